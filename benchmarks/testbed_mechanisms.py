"""Mechanisms on a cluster whose links really are slow and unequal, beside what the simulator predicts.

Eight workers and a store, each in a network namespace of its own: four workers with fast links, four with
slow ones, 10 to 1. All mechanisms train in one run, in turns, over the same links with the same transport.
Links are measured with all ranks there; compute, and all that an iteration takes besides transfer, come
from one more contender that trains rows nobody shares. Dense gradients and control messages have a
second, unshaped interface, as in the papers.
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
from testbed_experiment.experiment import (
    FAST_MBIT,
    MECHANISMS,
    NUM_FAST,
    NUM_SLOW,
    PER_WORKER,
    SLOW_MBIT,
    STILL,
    STORE_MBIT,
    Setting,
)

RANK = Path(__file__).parent / "testbed_experiment" / "rank.py"
SETTINGS = {
    "movielens-1m": Setting("movielens-1m", iterations=240, segment=40, warmup=40, dim=512),
    "criteo": Setting(
        "criteo",
        iterations=60,
        segment=20,
        warmup=20,
        dim=64,
        log_samples=250_000,
        mechanisms=("vanilla", "laia", "esd:1", "joint"),
    ),
}


def mbit(speed: float) -> Link:
    return Link(speed * 1e6 / 8)


def run(setting: Setting, timeout: float, speed: float) -> list[dict[str, Any]]:
    """What every rank printed, on links of so many times the usual speed."""
    links = [mbit(speed * FAST_MBIT)] * NUM_FAST + [mbit(speed * SLOW_MBIT)] * NUM_SLOW
    with ShapedNetwork(links, [mbit(speed * STORE_MBIT)]) as network:
        command = [sys.executable, str(RANK), json.dumps(setting.plain())]
        done = run_in(network, lambda rank: command, timeout, environment={"OMP_NUM_THREADS": "1"})
    return [json.loads(one.stdout.strip().splitlines()[-1]) for one in done.outputs]


def counted(setting: Setting, mechanism: str, result: dict[str, Any], name: str) -> list[float]:
    """A series over the iterations that count: not warming up, and not at the beginning of a turn."""
    (one,) = (one for one in MECHANISMS if one.name == mechanism)
    pairs = list(zip(result[name], result["seconds"], strict=True))
    return [value for value, seconds in pairs[setting.warmup_of(one) :] if seconds is not None]


def report(setting: Setting, printed: list[dict[str, Any]]) -> None:
    first = printed[0]
    results: dict[str, Any] = first["results"]
    means = {name: statistics.mean(counted(setting, name, one, "seconds")) for name, one in results.items()}
    speeds = ", ".join(f"{speed * 8 / 1e6:.3g}" for speed in first["links"][0])
    fixed = means[STILL]
    rows = []
    for name, one in results.items():
        if name == STILL:
            continue
        predicted = statistics.mean(counted(setting, name, one, "predicted"))
        rows.append(
            [
                name,
                1 / means[name],
                means[name] * 1e3,
                predicted * 1e3,
                f"{100 * (means[name] / predicted - 1):+.0f} %",
                means["laia"] / means[name] if "laia" in means else float("nan"),
                means["vanilla"] / means[name] if "vanilla" in means else float("nan"),
                statistics.mean(counted(setting, name, one, "plan_bytes")) / 1e3,
                min(counted(setting, name, one, "slacks")) * 1e3,
            ]
        )
    columns = [
        "mechanism", "iterations/s", "ms measured", "ms predicted", "off", "x LAIA", "x vanilla",
        "KB planned", "least slack, ms",
    ]  # fmt: skip
    print_table(
        f"{setting.data}, {setting.batch_size:,} samples an iteration, dim {setting.dim}, SGD", columns, rows
    )
    console.print(f"links measured, Mbit/s, workers then store: {speeds}")
    console.print(f"an iteration in which nothing moves: {fixed * 1e3:.1f} ms")
    if "vanilla" in means:
        console.print(f"transfer is {100 * (1 - fixed / means['vanilla']):.0f} % of vanilla's iteration")
    for name, one in results.items():
        for text in one["told"]:
            console.print(f"{name}: {text}")
    planned = sum(sum(one["plan_bytes"]) for one in results.values())
    carried = sum(one["kernel_bytes"] for one in printed)
    console.print(
        f"bytes of rows: {planned:,} planned; {carried:,} counted by the kernel, "
        f"{100 * (carried / planned - 1):+.1f} % (headers)"
    )
    cpu = sum(one["cpu_seconds"] for one in printed)
    console.print(f"CPU seconds of all ranks: {cpu:.0f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default=",".join(SETTINGS), help="comma-separated")
    parser.add_argument("--speed", type=float, default=1.0, help="of all links, times the usual one")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each data set")
    given = parser.parse_args()
    print_machine()
    console.print(
        f"{NUM_FAST} links of {given.speed * FAST_MBIT:g} Mbit/s, {NUM_SLOW} of {given.speed * SLOW_MBIT:g}, "
        f"the store's {given.speed * STORE_MBIT:g}; "
        f"{PER_WORKER} samples a worker on average; mechanisms in turns"
    )
    for name in given.data.split(","):
        try:
            report(SETTINGS[name], run(SETTINGS[name], given.timeout, given.speed))
        except TestbedUnavailable as reason:
            console.print(f"skipped: {reason}")
            return


if __name__ == "__main__":
    main()
