"""Bytes on the wire and time of an iteration with pruned rows, beside unpruned ones, over really slow links.

Workers and a store, each in a network namespace of its own, half of them with links of a tenth of the speed.
All train the same Criteo-like log in one run, in turns; the last pass counts, when rows have been pruned
several times. "90 %" means that a tenth of all values is kept: once as a tenth of the chunks, and once in two
dimensions, as a quarter of the columns and two fifths of the chunks. What is learned does not matter here:
labels are drawn.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import argparse
import json
import statistics
from typing import Any

from report import console, print_machine, print_table
from rowhaul.simulate.links import Link
from testbed.cluster import run_in
from testbed.errors import TestbedUnavailable
from testbed.network import ShapedNetwork
from testbed_experiment.pruned_rank import Setting

RANK = Path(__file__).parent / "testbed_experiment" / "pruned_rank.py"
UNPRUNED = "unpruned"


def prunings(dim: int, period: int, cold_start: int) -> dict[str, dict[str, Any] | None]:
    """What is compared."""
    return {
        UNPRUNED: None,
        "90 % of chunks": {"ratio": 0.9, "chunks": 2, "period": period},
        "90 % in two dimensions": {
            "ratio": 0.6,
            "chunks": 2,
            "period": period,
            "dims": dim // 4,
            "cold_start": cold_start,
        },
    }


def run(setting: Setting, workers: int, mbit: float, timeout: float) -> list[dict[str, Any]]:
    """What every rank printed."""
    fast, slow = Link(mbit * 1e6 / 8), Link(mbit * 1e5 / 8)
    links = [fast] * (workers - workers // 2) + [slow] * (workers // 2)
    with ShapedNetwork(links, [Link(10 * mbit * 1e6 / 8)]) as network:
        command = [sys.executable, str(RANK), json.dumps(setting.plain())]
        done = run_in(network, lambda rank: command, timeout, environment={"OMP_NUM_THREADS": "1"})
    return [json.loads(one.stdout.strip().splitlines()[-1]) for one in done.outputs]


def report(setting: Setting, printed: list[dict[str, Any]], workers: int) -> None:
    results: dict[str, Any] = printed[0]["results"]
    rows, means = [], {}
    for name, one in results.items():
        counted = slice(-setting.counted, None)
        seconds = [each for each in one["seconds"][counted] if each is not None]
        planned = statistics.mean(one["plan_bytes"][counted])
        told = statistics.mean(one["told_bytes"][counted])
        carried = sum(each["kernel_bytes"][name] for each in printed) / setting.counted
        means[name] = (statistics.median(seconds), planned + told, carried)
        _, held_bytes = printed[0]["held"][name]
        rows.append(
            [
                name,
                planned / 1e3,
                told / 1e3,
                carried / 1e3,
                carried / means[UNPRUNED][2],
                means[name][0] * 1e3,
                means[UNPRUNED][0] / means[name][0],
                held_bytes / 2**20,
            ]
        )
    columns = [
        "rows", "KB of rows", "KB of utilities", "KB by the kernel", "of unpruned", "ms", "x unpruned",
        "MiB held",
    ]  # fmt: skip
    print_table(
        f"Criteo-like log, {workers} workers x {setting.per_worker} samples, dim {setting.dim}, "
        f"{setting.optimizer}, {setting.dispatcher}; means of an iteration in the last {setting.counted}",
        columns,
        rows,
    )
    for name, one in results.items():
        for text in one["notes"][-1:]:
            console.print(f"{name}: {text}")
    ratio = min(means[name][2] for name in means) / means[UNPRUNED][2]
    console.print(
        f"fewest bytes on the wire at 90 %: {100 * ratio:.0f} % of unpruned (asked: at most 25 %)\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=80.0, help="of the fast links")
    parser.add_argument("--period", type=int, default=40)
    parser.add_argument("--cold-start", type=int, default=20)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batches", type=int, default=60, help="of the log, trained --epochs times")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=900.0)
    given = parser.parse_args()
    print_machine()
    setting = Setting(
        prunings(given.dim, given.period, given.cold_start),
        dim=given.dim,
        num_batches=given.batches,
        epochs=given.epochs,
        counted=given.batches,
    )
    try:
        report(setting, run(setting, given.workers, given.mbit, given.timeout), given.workers)
    except TestbedUnavailable as reason:
        console.print(f"skipped: {reason}")


if __name__ == "__main__":
    main()
