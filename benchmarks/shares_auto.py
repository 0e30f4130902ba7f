"""`--shares auto` on slow and unequal links: what it chooses, against every candidate measured by itself.

Eight co-located workers, each in a network namespace of its own, four of them with links ten times slower.
Everything travels over the shaped links: rows, dense gradients and control messages. `auto` runs several
times; each time it tries its candidates in training, decides, and the last iterations of the run count. Then
the candidates that it tried most often of each kind, one machine always among them, run by themselves with
fixed shares for as many iterations. After each `auto` run a single process trains the same samples, with
nobody waiting beside it: with one thread, as every rank has, and with all. The last columns compare the end
of each `auto` run with the best candidate and with those. Medians, wall time: run it on a quiet machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import argparse
import json
import re
import shutil
import statistics
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, replace

from report import console, print_machine, print_table
from rowhaul._cores import usable_cores
from rowhaul.data.generate.folder import generate_folder
from rowhaul.simulate.links import Link
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import ModelConfig, OptimizerConfig, TrainConfig
from testbed.cluster import run_in
from testbed.errors import TestbedUnavailable
from testbed.layout import Network
from testbed.network import ShapedNetwork

RANK = Path(__file__).parent / "testbed_experiment" / "shares_rank.py"
FAST_MBIT, SLOW_MBIT, NUM_FAST, NUM_SLOW = 80, 8, 4, 4
COUNTED = 50  # the last iterations
CONFIG = TrainConfig(
    model=ModelConfig("dlrm", embedding_dim=64, options={"bottom": [32], "top": [64, 32]}),
    rows=OptimizerConfig("rowwise_adagrad", 0.05),
    batch_size=1024,
    checkpoint_every=0,
    cluster=ClusterConfig(
        workers=NUM_FAST + NUM_SLOW, stores=0, colocated=True, peer_to_peer=True, cache="1GiB"
    ),
)


@dataclass(frozen=True)
class Measured:
    """One run: milliseconds of its last iterations, and the notes in its log."""

    milliseconds: float
    notes: list[str]

    @property
    def chosen(self) -> str:
        """The shares that `auto` has chosen, as text."""
        return next((found[1] for text in self.notes if (found := re.match(r"shares \[(.*?)\]", text))), "")

    @property
    def tried(self) -> dict[str, str]:
        """The shares that `auto` has tried, by kind."""
        (text,) = [one for one in self.notes if one.startswith("shares to be tried: ")][:1] or [""]
        parts = text.removeprefix("shares to be tried: ").split("; ")
        return {one.rpartition(" [")[0]: one.rpartition(" [")[2].rstrip("]") for one in parts if one}


def train(network: Network, data: Path, shares: str, steps: int, timeout: float) -> Measured:
    """Train with these shares."""
    config = replace(CONFIG, max_steps=steps, cluster=replace(CONFIG.cluster, shares=shares))
    out = Path(tempfile.mkdtemp(prefix="shares-auto-"))
    try:
        arguments = [str(RANK), str(data), str(out / "run"), json.dumps(config.to_dict())]
        done = run_in(
            network,
            lambda rank: [sys.executable, *arguments],
            timeout,
            folder=out,
            environment={"ROWHAUL_SIDE_INTERFACE": "haul0", "OMP_NUM_THREADS": "1"},
        )
        seconds = json.loads(done.outputs[0].stdout.strip().splitlines()[-1])
        lines = map(json.loads, (out / "run" / "metrics.jsonl").read_text().splitlines())
        notes = [line["text"] for line in lines if line["kind"] == "note"]
        return Measured(statistics.median(seconds[-COUNTED:]) * 1e3, notes)
    finally:
        shutil.rmtree(out, ignore_errors=True)


def train_single(data: Path, threads: int, steps: int, timeout: float) -> float:
    """Milliseconds of the last iterations of a single process."""
    config = replace(CONFIG, max_steps=steps, threads=threads, cluster=ClusterConfig())
    with tempfile.TemporaryDirectory(prefix="shares-auto-") as out:
        done = subprocess.run(
            [sys.executable, str(RANK), str(data), f"{out}/run", json.dumps(config.to_dict())],
            capture_output=True, text=True, check=True, timeout=timeout,
        )  # fmt: skip
    return statistics.median(json.loads(done.stdout.strip().splitlines()[-1])[-COUNTED:]) * 1e3


def compare(network: Network, data: Path, runs: int, steps: int, timeout: float) -> None:
    """Run `auto` several times, then each candidate; print all."""
    found, single = [], []
    for number in range(runs):
        found.append(train(network, data, "auto", steps, timeout))
        single.append([train_single(data, threads, steps, timeout) for threads in (1, usable_cores())])
        one, every = single[-1]
        console.print(
            f"run {number + 1}: {found[-1].milliseconds:.1f} ms with [{found[-1].chosen}]; "
            f"a single process {one:.1f} ms with one thread, {every:.1f} with all"
        )
    tried = Counter((kind, shares) for one in found for kind, shares in one.tried.items())
    most: dict[str, str] = {}
    for (kind, shares), _ in tried.most_common():
        most.setdefault(kind, shares)
    alone = {
        shares: train(network, data, shares.replace(" ", ""), steps, timeout).milliseconds
        for shares in most.values()
    }
    best = min(alone.values())
    print_table(
        f"candidates with fixed shares, {CONFIG.batch_size:,} samples an iteration",
        ["candidate", "shares", "ms", "of the best"],
        [[kind, shares, alone[shares], f"{alone[shares] / best:.2f}"] for kind, shares in most.items()],
    )
    rows = [
        [
            f"run {number}", one.chosen, one.milliseconds, f"{one.milliseconds / best:.2f}",
            *(f"{one.milliseconds / other:.2f}" for other in beside),
        ]
        for number, (one, beside) in enumerate(zip(found, single, strict=True), 1)
    ]  # fmt: skip
    heads = ["", "shares chosen", "ms at the end", "of the best candidate's"]
    heads += ["of a single process's, one thread", "all threads"]
    print_table("shares auto", heads, rows)
    for text in found[-1].notes:
        console.print(f"log of the last run: {text}")


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200, help="iterations of every run")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a run")
    given = parser.parse_args()
    print_machine()
    links = [Link(FAST_MBIT * 1e6 / 8)] * NUM_FAST + [Link(SLOW_MBIT * 1e6 / 8)] * NUM_SLOW
    console.print(f"{NUM_FAST} links of {FAST_MBIT} Mbit/s, {NUM_SLOW} of {SLOW_MBIT}; everything on them")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "log"
        generate_folder("criteo", given.steps * CONFIG.batch_size, data, test_share=0.0)
        try:
            with ShapedNetwork(links) as network:
                compare(network, data, given.runs, given.steps, given.timeout)
        except TestbedUnavailable as reason:
            console.print(f"skipped: {reason}")


if __name__ == "__main__":
    main()
