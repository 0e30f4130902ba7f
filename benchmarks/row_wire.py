"""Bytes on the wire and time of an iteration by how rows are held, over really slow links.

Workers and a store, each in a network namespace of its own, half of them with links of a tenth of the speed.
All train the same Criteo-like log in one run, in turns, with caches of equal bytes and one dispatcher: whole
rows in float32, in fewer bits, within a memory budget (a tenth of what whole rows take), and pruned.
"--prune 90%" is what that flag gives: a tenth of all values, pruned in two dimensions, columns and pieces.
Pieces alone are beside it. The last pass over the log is the steady state: rows have been pruned several
times, and columns are chosen. The first one is told, too. What is learned does not matter here: labels are
drawn.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import argparse
import json
import statistics
from dataclasses import asdict
from typing import Any

from report import console, print_machine, print_table
from rowhaul._quantities import parse_bytes
from rowhaul.pruning.config import PruneConfig
from rowhaul.simulate.links import Link
from rowhaul.store.packing import PLAIN, ROW_DTYPES
from testbed.cluster import run_in
from testbed.errors import TestbedUnavailable
from testbed.network import ShapedNetwork
from testbed_experiment.row_wire_rank import KINDS, WHOLE, Setting

RANK = Path(__file__).parent / "testbed_experiment" / "row_wire_rank.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
UNPRUNED = "whole, float32"


def ways(period: int, cold_start: int, budget: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """What is compared."""
    pruned = {
        "--prune 90%": PruneConfig(ratio="90%", period=period, cold_start=cold_start),
        "90 % of pieces alone": PruneConfig(ratio="90%", period=period, two_dimensions=False),
    }
    found: dict[str, tuple[str, dict[str, Any]]] = {UNPRUNED: (WHOLE, {})}
    found |= {f"whole, {one}": ("packed", {"row_dtype": one}) for one in ROW_DTYPES if one != PLAIN}
    found |= {
        f"budget, {one}": ("budget", {"bytes": budget, "period": period, "row_dtype": one})
        for one in (PLAIN, "int8")
    }
    for name, config in pruned.items():
        settings = config.settings()
        assert settings is not None
        found[name] = ("pruned", asdict(settings))
    return found


def run(setting: Setting, workers: int, mbit: float, timeout: float) -> list[dict[str, Any]]:
    """What every rank printed."""
    fast, slow = Link(mbit * 1e6 / 8), Link(mbit * 1e5 / 8)
    links = [fast] * (workers - workers // 2) + [slow] * (workers // 2)
    with ShapedNetwork(links, [Link(10 * mbit * 1e6 / 8)]) as network:
        command = [sys.executable, str(RANK), json.dumps(setting.plain())]
        done = run_in(network, lambda rank: command, timeout, environment=ENVIRONMENT)
    return [json.loads(one.stdout.strip().splitlines()[-1]) for one in done.outputs]


def report(setting: Setting, printed: list[dict[str, Any]], workers: int) -> None:
    results: dict[str, Any] = printed[0]["results"]
    rows, kinds, means = [], [], {}
    counted = slice(-setting.counted, None)
    for name, one in results.items():
        seconds = [each for each in one["seconds"][counted] if each is not None]
        planned, told = (statistics.mean(one[what][counted]) for what in ("plan_bytes", "report_bytes"))
        first = statistics.mean(one["plan_bytes"][: setting.num_batches])
        first += statistics.mean(one["report_bytes"][: setting.num_batches])
        carried = sum(each["kernel_bytes"][name] for each in printed) / setting.counted
        means[name] = (statistics.median(seconds), first, carried)
        _, held_bytes = printed[0]["held"][name]
        before = means[UNPRUNED]
        rows.append(
            [
                name,
                planned / 1e3,
                told / 1e3,
                carried / 1e3,
                carried / before[2],
                first / before[1],
                means[name][0] * 1e3,
                before[0] / means[name][0],
                held_bytes / 2**20,
            ]
        )
        by_kind = [statistics.mean(some) / 1e3 for some in zip(*one["kind_bytes"][counted], strict=True)]
        kinds.append([name, *by_kind])
    columns = [
        "rows", "KB of rows", "KB of utilities", "KB by the kernel", "of whole", "in the first pass", "ms",
        "x whole", "MiB held",
    ]  # fmt: skip
    print_table(
        f"Criteo-like log, {workers} workers x {setting.per_worker} samples, dim {setting.dim}, "
        f"{setting.optimizer}, {setting.dispatcher}; means of an iteration in the last {setting.counted}",
        columns,
        rows,
    )
    print_table("KB of rows by kind of move", ["rows", *KINDS], kinds)
    for name, one in results.items():
        for text in one["notes"][-1:]:
            console.print(f"{name}: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=80.0, help="of the fast links")
    parser.add_argument("--period", type=int, default=40)
    parser.add_argument("--cold-start", type=int, default=20)
    parser.add_argument("--budget", default="2MiB", help="about a tenth of what whole rows take")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dispatcher", default="laia")
    parser.add_argument("--peer-to-peer", action="store_true")
    parser.add_argument(
        "--log-samples", type=int, default=0, help="of a longer log, whose beginning is trained"
    )
    parser.add_argument("--batches", type=int, default=60, help="of the log, trained --epochs times")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=900.0)
    given = parser.parse_args()
    print_machine()
    setting = Setting(
        ways(given.period, given.cold_start, parse_bytes(given.budget, "--budget")),
        dim=given.dim,
        dispatcher=given.dispatcher,
        peer_to_peer=given.peer_to_peer,
        log_samples=given.log_samples,
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
