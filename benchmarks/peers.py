"""Rowhaul, one machine, TorchRec and DDP on links that really are slow: the same samples, everything shaped.

Every machine is a network namespace with one link: rows, dense gradients and control messages all travel over
it, for Rowhaul and its peers alike. One machine has no link. All train the same DLRM on the same Criteo-like
log, with one thread a process unless the name says otherwise; rows step by row-wise Adagrad (DDP and plain
PyTorch, which have none, by Adagrad). Contenders take turns; speeds are medians of the steps after the
warm-up, and the kernel counts the bytes.

All machines share this one's cores, of which there may be fewer than machines: what takes processor time, not
link time, is slower here than on machines of their own, for all contenders.

TorchRec lives in an environment of its own, ``.venv-torchrec``, made on the first run.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace

from peer_ranks.contenders import AUTO_STEPS, Contender, Setting, contenders
from peer_ranks.work import write_work
from report import console, print_machine, print_table
from rowhaul.simulate.links import Link
from testbed import counters
from testbed.cluster import run_in
from testbed.errors import RanksFailedError, TestbedUnavailable
from testbed.layout import HAUL
from testbed.network import ShapedNetwork
from testbed.processes import SIDE_INTERFACE_VARIABLE
from torchrec_colocated import peers_python

LARGE = ((512, 64), (256, 128, 64))  # 0.77 MB of dense weights
SMALL = ((64,), (64, 32))
SETTINGS = {
    "equal": Setting("4 machines x 100 Mbit/s", (100,) * 4, 2048, *LARGE),
    "unequal": Setting("4 machines x 80 and 4 x 8 Mbit/s, small layers", (80,) * 4 + (8,) * 4, 1024, *SMALL),
    "gigabit": Setting("4 machines x 1 Gbit/s", (1000,) * 4, 8192, *LARGE),
}
STORE_MBIT = 1000


@dataclass(frozen=True)
class Result:
    """One run of a contender."""

    seconds: float  # of a step
    link_seconds: float  # that the busiest link worked for a step, in its busier direction
    all_bytes: float  # that all links carried in a step


class Progress:
    """Follows the speed that rank 0 writes to a file, and reads the kernel's counters at both ends."""

    def __init__(self, path: Path, warm_up: int, read: object = None) -> None:
        self._path, self._warm_up = path, warm_up
        self._read = read
        self.began: tuple[int, counters.Counters] | None = None
        self.ended: tuple[int, counters.Counters] | None = None

    def lines(self) -> list[dict[str, float]]:
        if not self._path.exists():
            return []
        texts = self._path.read_text().splitlines()
        return [one for one in map(_parsed, texts) if one.get("kind") == "train"]

    def look(self) -> None:
        """Called now and then while ranks run."""
        steps = [int(one["step"]) for one in self.lines()]
        if not steps or steps[-1] < self._warm_up or not callable(self._read):
            return
        if self.began is None:
            self.began = steps[-1], self._read()
        elif steps[-1] > (self.ended or self.began)[0]:
            self.ended = steps[-1], self._read()

    def seconds(self, batch: int) -> float:
        counted = [batch / one["samples_per_second"] for one in self.lines() if one["step"] > self._warm_up]
        return statistics.median(counted)


def _parsed(text: str) -> dict[str, float]:
    try:
        found: dict[str, float] = json.loads(text)
        return found
    except json.JSONDecodeError:  # being written
        return {}


def run(contender: Contender, setting: Setting, work: Path, folder: Path, timeout: float) -> Result:
    """One run of one contender, on links of its own."""
    warm_up = setting.warm_up + contender.more_steps
    out, steps = folder / "run", warm_up + setting.steps
    command = contender.command(work, out, steps)
    if contender.workers == 1:
        alone = {**os.environ, "OMP_NUM_THREADS": str(contender.threads)}
        subprocess.run(command, check=True, timeout=timeout, env=alone, stdout=subprocess.DEVNULL)
        return Result(Progress(out / "metrics.jsonl", warm_up).seconds(setting.batch), 0, 0)
    links = [Link(speed * 1e6 / 8) for speed in sorted(setting.links, reverse=True)[: contender.workers]]
    stores = [Link(STORE_MBIT * 1e6 / 8)] * contender.stores
    with ShapedNetwork(links, stores) as network:
        progress = Progress(out / "metrics.jsonl", warm_up, lambda: counters.read(network))
        run_in(
            network,
            lambda rank: command,
            timeout,
            folder=folder,
            environment={
                SIDE_INTERFACE_VARIABLE: HAUL,
                "MASTER_ADDR": network.haul_address(0),
                "OMP_NUM_THREADS": str(contender.threads),
            },
            meanwhile=progress.look,
        )
    assert progress.began is not None
    assert progress.ended is not None
    passed, took = progress.ended[1] - progress.began[1], progress.ended[0] - progress.began[0]
    busy = [
        max(one.sent_bytes, one.received_bytes) / link.bytes_per_second
        for one, link in zip(passed.haul, [*links, *stores], strict=True)
    ]
    return Result(
        progress.seconds(setting.batch),
        max(busy) / took,
        sum(one.sent_bytes for one in passed.haul) / took,
    )


def compare(setting: Setting, torchrec: str, given: argparse.Namespace) -> None:
    """Print one table: all contenders in turns."""
    chosen = [one for one in contenders(setting, torchrec) if re.search(given.only, one.name)]
    results: defaultdict[str, list[Result]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as top:
        work = Path(top) / "work"
        write_work(work, setting, setting.warm_up + setting.steps + AUTO_STEPS)
        for turn in range(given.repeats):
            for number, one in enumerate(chosen):
                folder = Path(top) / f"{turn}-{number}"
                folder.mkdir()
                try:
                    found = run(one, setting, work, folder, given.timeout)
                    results[one.name].append(found)
                    console.print(f"{one.name}: {found.seconds * 1e3:.0f} ms a step", highlight=False)
                except (RanksFailedError, subprocess.SubprocessError) as error:
                    console.print(f"{one.name} failed: {error}", markup=False)
    medians = {
        name: Result(
            *(statistics.median(getattr(run, part) for run in runs) for part in Result.__dataclass_fields__)
        )
        for name, runs in results.items()
    }
    peers = [one.seconds for name, one in medians.items() if name.startswith("TorchRec")]
    alone = [one.seconds for name, one in medians.items() if name.startswith("one machine, Rowhaul")]
    rows = [
        [
            name,
            one.seconds * 1e3,
            f"{setting.batch / one.seconds:,.0f}",
            one.all_bytes / 1e6,
            one.link_seconds * 1e3,
            min(alone) / one.seconds if alone else float("nan"),
            min(peers) / one.seconds if peers else float("nan"),
        ]
        for name, one in medians.items()
    ]
    columns = [
        "", "ms a step", "samples/s", "MB a step", "ms, busiest link", "x one machine", "x TorchRec's best",
    ]  # fmt: skip
    title = f"{setting.title}, {setting.batch:,} samples a step, dim {setting.dim}"
    print_table(f"{title}, threads of a process: {setting.threads}", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="comma-separated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="that count, after 30 others")
    parser.add_argument("--batch", type=int, default=0, help="samples a step, instead of the setting's")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--only", default="", help="contenders whose name matches this expression")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run")
    given = parser.parse_args()
    torchrec = str(peers_python())
    print_machine()
    for name in given.settings.split(","):
        try:
            setting = replace(SETTINGS[name], steps=given.steps, threads=given.threads)
            compare(replace(setting, batch=given.batch or setting.batch), torchrec, given)
        except TestbedUnavailable as reason:
            console.print(f"skipped: {reason}")
            return


if __name__ == "__main__":
    main()
