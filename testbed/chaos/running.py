"""One training run on the testbed, started again with ``--resume`` as often as it ends early."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from testbed.chaos.leftovers import Leftovers
from testbed.errors import TestbedError
from testbed.layout import Network
from testbed.processes import RankProcesses

START_SECONDS = 120.0  # a machine under load imports PyTorch on every rank
_POLL_SECONDS = 0.02
_SECRET = "a secret of the ranks, long enough to be one"


class ChaosError(TestbedError):
    """The run did not do what it promises."""


@dataclass
class Run:
    """A training run in a folder.

    Args:
        network: the machines, one rank each.
        data: what to train on.
        out: the run's folder.
        work: for output and temporary files of ranks.
        random: draws victims and moments.
        options: of ``rowhaul train``, besides data and folder.
    """

    network: Network
    data: Path
    out: Path
    work: Path
    random: random.Random
    options: Sequence[str]
    attempt: int = 0
    ranks: RankProcesses | None = field(default=None, repr=False)
    left: Leftovers | None = field(default=None, repr=False)

    @property
    def processes(self) -> RankProcesses:
        """The ranks of the current attempt."""
        assert self.ranks is not None
        return self.ranks

    @property
    def step(self) -> int:
        """The last step in the log; 0 before the first."""
        try:
            lines = (self.out / "metrics.jsonl").read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return 0
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except ValueError:  # the last line may be cut short
                continue
        return 0

    def hold(self, rank: int) -> Path:
        """The file that makes a rank's reader wait."""
        return self.work / f"hold-{rank}"

    def start(self) -> None:
        """Start all ranks; from the second time on they resume."""
        self.attempt += 1
        folder, temporary = self.work / f"attempt-{self.attempt:03d}", self.work / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        self.left = Leftovers(self.network, temporary)
        environment: Mapping[str, str] = {"TMPDIR": str(temporary), "ROWHAUL_SECRET": _SECRET}
        self.ranks = RankProcesses(self.network, self._command, folder, environment)
        self.ranks.__enter__()

    def _command(self, rank: int) -> list[str]:
        train = ["train", "--data", str(self.data), "--out", str(self.out), "--resume", *self.options]
        return [sys.executable, "-m", "testbed.chaos.rank", str(self.hold(rank)), *train]

    def wait_for_steps(self, count: int, seconds: float, what: str) -> bool:
        """Wait until training is ``count`` steps on; False where the run has ended well before that."""
        begin = self.step
        self._wait(lambda: self.step >= begin + count or not self.processes.running, seconds, what)
        if self.processes.failed:
            raise ChaosError(f"{what}: ranks {self.processes.failed} failed\n{self.said()}")
        return bool(self.processes.running)

    def wait_for_end(self, seconds: float, what: str, besides: Sequence[int] = ()) -> float:
        """Wait until all ranks but some have ended; return the seconds it took."""
        began = time.monotonic()
        self._wait(lambda: set(self.processes.running) <= set(besides), seconds, what)
        return time.monotonic() - began

    def _wait(self, happened: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                raise ChaosError(f"{what}: nothing for {seconds:g} s\n{self.said()}")
            time.sleep(_POLL_SECONDS)

    def said(self, ranks: Sequence[int] | None = None) -> str:
        """What ranks have printed in this attempt, their errors last."""
        texts = []
        for rank in self.network.ranks if ranks is None else ranks:
            for stream in ("stdout", "stderr"):
                text = (self.processes.folder / f"rank-{rank}.{stream}").read_text(errors="replace")
                texts += [f"[{rank}] {line}" for line in text.splitlines()[-40:]]
        return "\n".join(texts)

    def end(self) -> None:
        """End what still runs."""
        for rank in self.network.ranks:
            self.hold(rank).unlink(missing_ok=True)
        if self.ranks is not None:
            self.ranks.end()

    def lose_a_worker(self) -> None:
        """Go on without one machine from the next attempt on."""
        before = self.network
        self.network = Network(before.name, before.workers[:-1], before.stores)

    def check_nothing_left(self) -> None:
        """Raise if something outlived the ranks."""
        assert self.left is not None
        if found := self.left.found():
            raise ChaosError("left behind: " + "; ".join(found))
