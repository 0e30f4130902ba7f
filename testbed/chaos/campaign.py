"""Throws faults at runs until enough were thrown, and compares each run with an undisturbed one."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rowhaul.simulate.links import parse_links
from testbed import signals
from testbed.chaos.faults import Fault, MachineGone
from testbed.chaos.faults.storage import disk, remove_disk
from testbed.chaos.learned import Learned, difference, learned
from testbed.chaos.running import START_SECONDS, ChaosError, Run
from testbed.layout import Network
from testbed.network import ShapedNetwork

WORKERS, STORES = 2, 1
LINKS = "200mbit"
SAMPLES, STEPS = 60_000, 800
DISK_MEGABYTES = 96
FIRST_STEPS, STEPS_AFTER = 3, 3  # trained before a fault is thrown, and after it
MOST_STEPS_BETWEEN = 20
END_SECONDS = 300.0  # for the rest of a run that nothing disturbs
ROUNDING = 1e-9

# What would depend on measured times is fixed; saves are by the clock, as bits don't depend on them.
EXACT = (
    "--stores", str(STORES), "--batch-size", "64", "--max-steps", str(STEPS), "--embedding-dim", "4",
    "--dispatcher", "esd:1", "--cache", "800", "--hot", "50", "--look-ahead", "1", "--checkpoint-every", "1s",
    "--set", "log_every=1", "--set", "model.options.top=[8]", "--set", "model.options.bottom=[8]",
)  # fmt: skip
# With another number of machines, or with settings that are measured, runs agree to rounding.
ROUNDED = (*EXACT, "--precision", "float64", "--shares", "auto", "--links", "measure")


@dataclass(frozen=True)
class Outcome:
    """What came of one fault."""

    fault: type[Fault]
    run: int
    step: int
    victim: int
    seconds: float  # until the ranks had ended, or training had gone on
    trouble: str = ""  # empty: as promised


@dataclass(frozen=True)
class RunOutcome:
    """How far a run ended from the undisturbed one."""

    apart: float
    allowed: float


class Campaign:
    """Runs on one small cluster, one after the other.

    Args:
        folder: for data, runs and output.
        seed: of everything that is drawn.
        kinds: of faults.
        report: called with a line for each event.
    """

    def __init__(
        self, folder: Path, seed: int, kinds: Sequence[type[Fault]], report: Callable[[str], None]
    ) -> None:
        self._folder, self._random, self._kinds, self._report = folder, random.Random(seed), kinds, report
        self._data = folder / "data"
        self._undisturbed: dict[Sequence[str], Learned] = {}  # by options
        self.outcomes: list[Outcome] = []
        self.runs: list[RunOutcome] = []

    @property
    def num_kept(self) -> int:
        """Faults of which came what was promised, in runs that ended as promised."""
        broken = {number for number, run in enumerate(self.runs) if run.apart > run.allowed}
        return sum(not one.trouble and one.run not in broken for one in self.outcomes)

    def go(self, num_faults: int) -> None:
        """Throw that many faults."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not self._data.exists():
            generate = ["generate", "--rows", str(SAMPLES), "--out", str(self._data)]
            subprocess.run([sys.executable, "-m", "rowhaul", *generate], check=True, capture_output=True)
        pending = self._draw(num_faults)
        links = parse_links(LINKS, WORKERS, "links"), parse_links(LINKS, STORES, "links")
        with ShapedNetwork(*links) as network:
            while pending:
                # A machine that is gone changes the bits, so such a run is compared to rounding.
                shrinks = pending[0] is MachineGone
                options, allowed = (ROUNDED, ROUNDING) if shrinks else (EXACT, 0.0)
                self._one_run(network, pending, options, allowed)

    def _draw(self, count: int) -> list[type[Fault]]:
        """Draw faults: all kinds about equally often, in random order."""
        drawn: list[type[Fault]] = []
        while len(drawn) < count:
            drawn += self._random.sample(list(self._kinds), len(self._kinds))
        return drawn[:count]

    @contextmanager
    def _new_run(self, network: Network, name: str, options: Sequence[str]) -> Iterator[Run]:
        work = self._folder / name
        disk(work / "run", DISK_MEGABYTES)
        run = Run(network, self._data, work / "run", work, self._random, options)
        try:
            yield run
        finally:
            with signals.held_back():
                run.end()
                remove_disk(work / "run")

    def _expected(self, network: Network, options: Sequence[str]) -> Learned:
        """Train undisturbed, once for each set of options."""
        if options not in self._undisturbed:
            with self._new_run(network, f"undisturbed-{len(self._undisturbed)}", options) as run:
                run.start()
                self._finish(run)
                self._undisturbed[options] = learned(run.out)
        return self._undisturbed[options]

    def _one_run(
        self, network: Network, pending: list[type[Fault]], options: Sequence[str], allowed: float
    ) -> None:
        expected, number = self._expected(network, options), len(self.runs)
        with self._new_run(network, f"run-{number:03d}", options) as run:
            run.start()
            previous: Fault | None = None
            while True:
                trains = run.wait_for_steps(FIRST_STEPS, START_SECONDS, "starting")
                if previous is not None:
                    self._judge_restart(previous)
                if not trains or not pending or (pending[0] is MachineGone) != bool(allowed):
                    break
                if not run.wait_for_steps(self._random.randrange(1, MOST_STEPS_BETWEEN), 60.0, "training"):
                    break
                previous = self._throw(run, pending.pop(0), number)
                if allowed:
                    break
            self._finish(run)
            apart = difference(learned(run.out), expected)
        self.runs.append(RunOutcome(apart, allowed))
        verdict = "the same bits" if apart == 0 else f"apart by {apart:.1e} (allowed: {allowed:g})"
        self._report(f"run {number}: {verdict}")

    def _throw(self, run: Run, kind: type[Fault], number: int) -> Fault | None:
        """Throw a fault; return it where the run was started again after it."""
        fault, step, seconds, trouble = kind(run), run.step, 0.0, ""
        try:
            seconds = self._suffer(run, fault)
        except ChaosError as error:
            trouble = str(error)
            run.end()
        self.outcomes.append(Outcome(kind, number, step, fault.victim, seconds, trouble))
        verdict = trouble or (f"ended in {seconds:.1f} s" if fault.ends_run else "went on")
        self._report(f"{len(self.outcomes):3d}  step {step:3d}  rank {fault.victim}  {kind.name}: {verdict}")
        if not fault.ends_run and not trouble:
            return None
        run.start()
        return None if trouble else fault

    def _suffer(self, run: Run, fault: Fault) -> float:
        fault.throw()
        if not fault.ends_run:
            run.wait_for_steps(STEPS_AFTER, fault.seconds, f"{fault.name}: going on")
            fault.repair()
            return 0.0
        survivors = fault.survivors()
        others = [rank for rank in run.network.ranks if rank not in survivors]
        seconds = run.wait_for_end(fault.seconds, f"{fault.name}: ending", besides=others)
        fault.check()
        fault.repair()
        run.wait_for_end(fault.seconds, f"{fault.name}: ending of the victim")
        run.check_nothing_left()
        return seconds

    def _judge_restart(self, fault: Fault) -> None:
        """Note what the attempt after a fault did not say."""
        try:
            fault.check_next()
        except ChaosError as error:
            self.outcomes[-1] = replace(self.outcomes[-1], trouble=str(error))
            self._report(f"     {fault.name}: {error}")

    def _finish(self, run: Run) -> None:
        run.wait_for_end(END_SECONDS, "finishing")
        if run.processes.failed:
            raise ChaosError(f"ranks {run.processes.failed} failed without a fault\n{run.said()}")
        run.check_nothing_left()
