"""How many rows to replicate: what the performance model predicts against what iterations take.

Four ranks that store and train, on links shaped to one speed (network namespaces; sums and rows share the
link) and over loopback, where processors are what is short. One model trains on while sets of different
sizes take turns; the size that the model chose, before, is among them, and the one that stayed when a few
were tried. HypeReca fits its two coefficients to the measured times and has r2 > 0.9; here one constant is
known from training without hot rows, and nothing is fitted to what is predicted.
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
from itertools import chain
from typing import Any

import matplotlib as mpl
import numpy as np

from figures.traces import generated
from report import console, print_machine, print_table
from rowhaul.simulate.links import Link
from rowhaul.tuning.hot_set.trial import TURN
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
    sizes = [one["num_rows"] for one in printed["predicted"]]
    measured = [statistics.median(one["seconds"]) for one in printed["measured"]]
    predicted = [one["seconds"] for one in printed["predicted"]]
    chosen, tried = printed["chosen"]["num_rows"], printed["after_trial"]
    rows = [
        [
            f"{size:,}" + " (chosen)" * (size == chosen) + " (stayed)" * (size == tried),
            f"{100 * one['coverage']:.0f} %",
            _both(statistics.mean(found["summed"]), one["summed_rows"]),
            _both(statistics.mean(found["moved"]), one["moved_rows"]),
            seconds * 1e3,
            one["seconds"] * 1e3,
            f"{100 * (seconds / one['seconds'] - 1):+.0f} %",
            (printed["overhead"] + statistics.mean(found["replayed"])) * 1e3,
            measured[0] / seconds,
            statistics.median(found["cpu_seconds"]) * 1e3,
        ]
        for size, one, found, seconds in zip(
            sizes, printed["predicted"], printed["measured"], measured, strict=True
        )
    ]
    columns = [
        "hot rows", "of accesses", "rows summed (predicted)", "rows moved (predicted)", "ms measured",
        "ms predicted", "off", "ms by the plans", "x without", "CPU ms, all ranks",
    ]  # fmt: skip
    kind = "co-located" if setting.colocated else "three workers, one store"
    print_table(f"{where}: {RANKS} ranks, {kind}, {setting.batch_size:,} samples an iteration", columns, rows)
    shift = statistics.mean(measured) - statistics.mean(predicted)
    by_plans = [row[7] / 1e3 for row in rows]
    at_chosen, at_tried = (measured[sizes.index(one)] for one in (chosen, tried))
    console.print(
        f"r2 {determination(measured, predicted):.3f} as predicted, "
        f"{determination(measured, [one + shift for one in predicted]):.3f} with a constant added, "
        f"{determination(measured, by_plans):.3f} by the plans that were carried out"
    )
    console.print(
        f"chosen by the model {chosen:,} rows: {100 * (at_chosen / min(measured) - 1):.1f} % from the best "
        f"measured, {measured[0] / at_chosen:.2f} times as fast as without; the choice took "
        f"{printed['choosing_seconds']:.1f} s"
    )
    trial = ", ".join(f"{int(size):,} {seconds * 1e3:.0f} ms" for size, seconds in printed["trial"].items())
    console.print(
        f"tried in training ({trial}), {tried:,} rows stayed: {100 * (at_tried / min(measured) - 1):.1f} % "
        f"from the best measured, {measured[0] / at_tried:.2f} times as fast as without"
    )
    exchange = statistics.median(chain(*(one["exchange_seconds"] for one in printed["measured"])))
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
        f"{statistics.mean(printed['compute']) * setting.batch_size / RANKS * 1e3:.1f} ms a worker; "
        f"{printed['overhead'] * 1e3:.1f} ms of an iteration that nothing explains"
    )
    plot.parent.mkdir(parents=True, exist_ok=True)
    plot.with_suffix(".json").write_text(json.dumps(printed))
    every = [one["seconds"] for one in printed["measured"]]
    draw(f"{where}, {kind}", sizes, measured, predicted, every, chosen, plot)
    console.print(f"plot: {plot}\n")


def _both(measured: float, predicted: float) -> str:
    return f"{measured:,.0f} ({predicted:,.0f})"


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
    parser.add_argument("--timeout", type=float, default=900.0)
    given = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as temporary:
        plain = HotSetting(
            "", given.dim, given.batch_size, SIZES, given.topology == "colocated", given.dispatcher,
            rounds=given.rounds,
        )  # fmt: skip
        most_tried = 3  # sizes that are worth a trial
        iterations = plain.profile + 2 * most_tried * TURN + 4
        iterations += plain.rounds * plain.segment * (len(SIZES) + most_tried)
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
