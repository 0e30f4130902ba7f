"""How many rows to replicate: what the performance model predicts against what iterations take.

Four ranks that store and train, on links shaped to one speed (network namespaces; sums and rows share the
link) and over loopback, where processors are what is short. One model trains on while sets of different
sizes take turns; the size that the model chose, before, is among them. HypeReca fits its two coefficients
to the measured times and has r2 > 0.9; here nothing is fitted to what is predicted.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from dataclasses import asdict
from typing import Any

import matplotlib as mpl
import numpy as np

from figures.traces import generated
from report import console, print_machine, print_table
from rowhaul.simulate.links import Link
from testbed.cluster import run_in
from testbed.errors import TestbedUnavailable
from testbed.network import ShapedNetwork
from testbed_experiment.hot_rank import HotSetting

mpl.use("Agg")
import matplotlib.pyplot as plt

RANKS = 4
RANK = Path(__file__).parent / "testbed_experiment" / "hot_rank.py"
SIZES = (0, 64, 512, 2048, 8192, 16384, 32768)
PLOTS = Path(__file__).parent / ".cache"


def store_trace(preset: str, samples: int, folder: Path) -> str:
    """The ids in a file, so that the ranks need not all make them."""
    trace = generated(preset, samples)
    path = folder / "trace.npz"
    np.savez(
        path,
        keys=np.stack(trace.keys),
        present=np.stack(trace.present),
        columns=np.array(trace.columns),
        num_rows=trace.num_rows,
    )
    return str(path)


def on_testbed(setting: HotSetting, mbit: float, timeout: float) -> dict[str, Any]:
    """What rank 0 printed, each rank in a network namespace, all traffic over one shaped link each."""
    ranks = RANKS if setting.colocated else RANKS - 1
    links = [Link(mbit * 1e6 / 8)] * ranks
    stores = [] if setting.colocated else [Link(mbit * 1e6 / 8)]
    with ShapedNetwork(links, stores) as network:
        command = [sys.executable, str(RANK), json.dumps(asdict(setting))]
        environment = {"OMP_NUM_THREADS": "1", "ROWHAUL_SIDE_INTERFACE": "haul0"}
        done = run_in(network, lambda rank: command, timeout, environment=environment)
    return json.loads(done.outputs[0].stdout.strip().splitlines()[-1])


def on_loopback(setting: HotSetting, timeout: float) -> dict[str, Any]:
    """The same without any shaping."""
    workers, stores = (RANKS, 0) if setting.colocated else (RANKS - 1, 1)
    program = (
        "from rowhaul.cluster import launch; import sys; "
        f"launch([], {workers}, {stores}, {setting.colocated}, command=sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, sys.executable, str(RANK), json.dumps(asdict(setting))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment, timeout=timeout, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"predicted"')]
    return json.loads(lines[-1])


def determination(measured: list[float], predicted: list[float]) -> float:
    """How much of the differences between measured times is predicted: r2, at most 1."""
    y, p = np.array(measured), np.array(predicted)
    return float(1 - ((y - p) ** 2).sum() / ((y - y.mean()) ** 2).sum())


def report(where: str, setting: HotSetting, printed: dict[str, Any], plot: Path) -> None:
    by_size: dict[int, tuple[dict[str, Any], list[float], float, float]] = {}
    for place, one in enumerate(printed["predicted"]):
        before = by_size.get(one["num_rows"], (one, [], 0.0, 0.0))[1]
        summed, cpu = printed["summed"][place], printed["cpu_seconds"][place]
        by_size[one["num_rows"]] = (
            one,
            before + printed["seconds"][place],
            statistics.mean(summed),
            statistics.median(cpu),
        )
    sizes = sorted(by_size)
    measured = [statistics.median(by_size[size][1]) for size in sizes]
    predicted = [by_size[size][0]["seconds"] for size in sizes]
    chosen = printed["chosen"]["num_rows"]
    rows = [
        [
            f"{size:,}" + (" (chosen)" if size == chosen else ""),
            f"{100 * by_size[size][0]['coverage']:.0f} %",
            by_size[size][2],
            by_size[size][0]["moved_rows"],
            measured[place] * 1e3,
            predicted[place] * 1e3,
            f"{100 * (measured[place] / predicted[place] - 1):+.0f} %",
            measured[0] / measured[place],
            by_size[size][3] * 1e3,
        ]
        for place, size in enumerate(sizes)
    ]
    columns = [
        "hot rows", "of accesses", "rows summed", "rows moved", "ms measured", "ms predicted", "off",
        "x without", "CPU ms, all ranks",
    ]  # fmt: skip
    kind = "co-located" if setting.colocated else "three workers, one store"
    print_table(f"{where}: {RANKS} ranks, {kind}, {setting.batch_size:,} samples an iteration", columns, rows)
    shift = statistics.mean(measured) - statistics.mean(predicted)
    at_chosen = measured[sizes.index(chosen)]
    offset = determination(measured, [one + shift for one in predicted])
    console.print(
        f"r2 {determination(measured, predicted):.3f} as predicted, {offset:.3f} with a constant added; "
        f"chosen {chosen:,} rows: {100 * (at_chosen / min(measured) - 1):.1f} % from the best measured, "
        f"{measured[0] / at_chosen:.2f} times as fast as without; the choice took "
        f"{printed['choosing_seconds']:.1f} s"
    )
    exchange = statistics.median(printed["exchange_seconds"])
    console.print(
        f"another set: {exchange * 1e3:.0f} ms in the median, {exchange / at_chosen:.1f} iterations; links "
        + ", ".join(f"{speed * 8 / 1e6:.3g}" for speed in printed["links"])
        + f" Mbit/s; a byte of a sum counts {printed['sum_weight']:.2f}"
    )
    console.print(f"the clock's links, set by moves and sums: {', '.join(printed['clock'])}")
    busy = printed["processors"]
    console.print(
        f"processors: {busy['seconds'] * 1e3:.1f} ms an iteration, {busy['per_moved_row'] * 1e6:.2f} us a "
        f"row that moves, {busy['per_summed_row'] * 1e6:.2f} us one that is summed; compute "
        f"{statistics.mean(printed['compute']) * setting.batch_size / RANKS * 1e3:.1f} ms a worker"
    )
    plot.with_suffix(".json").write_text(json.dumps(printed))
    draw(f"{where}, {kind}", sizes, measured, predicted, [by_size[size][1] for size in sizes], chosen, plot)
    console.print(f"plot: {plot}\n")


def draw(
    where: str,
    sizes: list[int],
    measured: list[float],
    predicted: list[float],
    every: list[list[float]],
    chosen: int,
    path: Path,
) -> None:
    """Predicted and measured iterations over the size of the set."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    places = np.arange(len(sizes))
    low, high = (np.array([np.quantile(one, q) for one in every]) * 1e3 for q in (0.25, 0.75))
    axes.fill_between(places, low, high, color="tab:blue", alpha=0.15, label="measured, middle half")
    axes.plot(places, np.array(measured) * 1e3, "o-", color="tab:blue", label="measured, median")
    axes.plot(places, np.array(predicted) * 1e3, "s--", color="tab:red", label="predicted")
    axes.axvline(sizes.index(chosen), color="grey", linestyle=":", label="chosen by the model")
    axes.set_xticks(places, [f"{size:,}" for size in sizes])
    axes.set_ylim(0)
    axes.set_xlabel("rows that every worker holds")
    axes.set_ylabel("milliseconds an iteration")
    axes.set_title(where)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--where", default="testbed,loopback", help="comma-separated")
    parser.add_argument("--topology", default="colocated", help="colocated, or stores: three workers and one")
    parser.add_argument("--data", default="criteo")
    parser.add_argument("--mbit", type=float, default=50.0, help="of every link of the testbed")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--dispatcher", default="round-robin")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0)
    given = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as temporary:
        plain = HotSetting(
            "", given.dim, given.batch_size, SIZES, given.topology == "colocated", given.dispatcher,
            rounds=given.rounds,
        )  # fmt: skip
        iterations = plain.observed + plain.rounds * plain.segment * (len(SIZES) + 1) + 4
        trace = store_trace(given.data, iterations * given.batch_size, Path(temporary))
        setting = HotSetting(**{**asdict(plain), "trace": trace})
        for where in given.where.split(","):
            plot = PLOTS / f"hot-set-{where}-{given.topology}.png"
            try:
                if where == "testbed":
                    title = f"{given.mbit:g} Mbit/s links"
                    report(title, setting, on_testbed(setting, given.mbit, given.timeout), plot)
                else:
                    report("loopback", setting, on_loopback(setting, given.timeout), plot)
            except TestbedUnavailable as reason:
                console.print(f"skipped: {reason}")


if __name__ == "__main__":
    main()
