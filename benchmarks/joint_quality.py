"""What joint dispatch saves, and what it takes: cost and slowest link beside laia and esd, cost against time.

    python benchmarks/joint_quality.py [--samples 204800]

8 workers of 128 samples, ESD's links (4 of 5 and 4 of 0.5 Gbit/s), LRU caches of 8 % of the rows (10 % on
MovieLens-1M), first touch off, the first 10 iterations left out; all presets of the generator, and
MovieLens-1M in the order of time. The plot is written to benchmarks/.cache/joint_quality.png.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import matplotlib as mpl
import numpy as np
import pyarrow as pa

mpl.use("Agg")
import matplotlib.pyplot as plt

from datasets import CACHE
from figures.traces import movielens
from report import console, print_machine, print_table
from rowhaul import _environment
from rowhaul.data.generate import LogGenerator, preset_names
from rowhaul.schedule import (
    CacheSettings,
    IdBatch,
    RowSizes,
    Scheduler,
    ScheduleSettings,
    Topology,
    link_prices,
)
from rowhaul.schedule.dispatch import make_dispatcher
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.plan import Kind

BATCH = 1024
WARM_UP = 10
PRICES = link_prices([5e9 / 8] * 4 + [0.5e9 / 8] * 4)
PASSES = (0, 1, 2, 4, 8, 16, 32)
FAST_ONLY = (1, 1, 1, 1, 0, 0, 0, 0)
MOSTLY_FAST = (31, 31, 31, 31, 1, 1, 1, 1)


@dataclass(frozen=True)
class Log:
    """The global batches of some consecutive samples."""

    name: str
    batches: list[IdBatch]
    num_tables: int
    num_rows: int  # distinct (table, key) pairs: what caches are shares of

    @classmethod
    def of(cls, name: str, batches: Iterable[IdBatch], num_tables: int) -> Log:
        held = list(batches)
        tables = np.concatenate([batch.tables for batch in held])
        keys = np.concatenate([batch.keys for batch in held])
        num_rows = sum(len(np.unique(keys[tables == table])) for table in range(num_tables))
        return cls(name, held, num_tables, num_rows)


def generated(preset: str, samples: int) -> Log:
    """The beginning of a generated log; a missing value is no id, a list is several."""
    generator = LogGenerator(preset, samples)
    table = pa.Table.from_batches(generator.batches())
    columns = [column.name for column in generator.schema.ids]

    def read() -> Iterator[IdBatch]:
        for start in range(0, samples - BATCH + 1, BATCH):
            parts = [table[name].slice(start, BATCH).combine_chunks() for name in columns]
            ids = [part.flatten() if pa.types.is_list(part.type) else part.drop_null() for part in parts]
            lengths = [
                part.value_lengths().fill_null(0) if pa.types.is_list(part.type) else part.is_valid()
                for part in parts
            ]
            counts = np.stack([length.to_numpy(zero_copy_only=False) for length in lengths])
            values = np.concatenate([part.to_numpy() for part in ids])
            yield IdBatch.from_features(range(len(columns)), values, counts.astype(np.int32))

    return Log.of(preset, read(), len(columns))


class Timed:
    """A dispatcher that notes how long it takes."""

    def __init__(self, text: str) -> None:
        self._inner = make_dispatcher(text)
        self.name = self._inner.name
        self.seconds: list[float] = []

    def assign(self, task: DispatchTask) -> np.ndarray:
        began = time.perf_counter()
        worker = self._inner.assign(task)
        self.seconds.append(time.perf_counter() - began)
        return worker


@dataclass(frozen=True)
class Run:
    """What a mechanism costs an iteration, in moves of a row over a fast link."""

    cost: float
    slowest_link: float  # slowest send and slowest receive
    dispatch_ms: float


def run(log: Log, dispatcher: str, shares: Sequence[int] | None = None) -> Run:
    timed = Timed(dispatcher)
    cache_share = 0.10 if log.name == "movielens-1m" else 0.08
    settings = ScheduleSettings(
        topology=Topology(len(PRICES)),
        sizes=RowSizes(values=(1,) * log.num_tables, state=(0,) * log.num_tables),
        prices=PRICES,
        cache=CacheSettings(int(log.num_rows * cache_share)),
        dispatcher=timed,
        shares=None if shares is None else tuple(shares),
        first_touch=False,
    )
    scheduler = Scheduler(settings, log.batches)
    costs, slowest = [], []
    while scheduler.fill():
        rows, _ = scheduler.plan().counts()
        by_link = rows * np.array(PRICES)
        pulls = by_link[Kind.MISS_PULL]
        pushes = by_link[Kind.UPDATE_PUSH] + by_link[Kind.EVICT_PUSH]
        costs.append(by_link.sum())
        slowest.append(pulls.max() + pushes.max())
    return Run(
        float(np.mean(costs[WARM_UP:])),
        float(np.mean(slowest[WARM_UP:])),
        1e3 * float(np.median(timed.seconds[WARM_UP:])),
    )


def less(new: float, old: float) -> str:
    return f"{1 - new / old:.1%}"


def print_costs(logs: Sequence[Log]) -> None:
    lines, ratios = [], []
    for log in logs:
        laia, esd, joint = (run(log, name) for name in ("laia", "esd:1", "joint"))
        ratios.append(joint.cost / esd.cost)
        lines.append(
            [
                log.name, laia.cost, esd.cost, joint.cost, less(esd.cost, laia.cost),
                less(joint.cost, laia.cost), less(joint.cost, esd.cost), joint.dispatch_ms,
            ]
        )  # fmt: skip
        console.print(f"{log.name} done")
    mean = float(np.exp(np.mean(np.log(ratios))))
    lines.append(["geometric mean", "", "", "", "", "", less(mean, 1), ""])
    columns = ["log", "laia", "esd:1", "joint", "esd < laia", "joint < laia", "joint < esd", "joint ms"]
    print_table("cost of an iteration, equal shares", columns, lines)


def print_slowest_links(logs: Sequence[Log]) -> None:
    lines = []
    for log in logs:
        everywhere, fast = run(log, "laia").slowest_link, run(log, "laia", FAST_ONLY).slowest_link
        joint = min(run(log, "joint", shares).slowest_link for shares in (FAST_ONLY, MOSTLY_FAST))
        lines.append([log.name, everywhere, fast, joint, f"{everywhere / joint:.1f}x", less(joint, fast)])
    columns = ["log", "laia on all", "laia on the fast", "joint", "all / joint", "joint < laia on the fast"]
    print_table("slowest link, shares all or nearly all on the four fast workers", columns, lines)


def plot_cost_against_time(logs: Sequence[Log]) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for log in logs:
        reference = run(log, "esd:1")
        runs = [reference, *(run(log, f"joint:{passes}") for passes in PASSES)]
        axes.plot(
            [one.dispatch_ms for one in runs],
            [one.cost / reference.cost for one in runs],
            marker="o",
            label=log.name,
        )
    axes.set(xlabel="dispatch, ms", ylabel="cost, relative to esd:1")
    axes.set_title(f"esd:1, then joint with {', '.join(map(str, PASSES))} passes")
    axes.legend()
    figure.savefig(CACHE / "joint_quality.png", dpi=120, bbox_inches="tight")
    console.print(f"written to {CACHE / 'joint_quality.png'}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=204_800)
    samples = parser.parse_args().samples
    _environment.keep_freed_memory()
    print_machine()
    movies = movielens(samples)
    logs = [Log(movies.name, list(movies.batches(BATCH)()), movies.num_tables, movies.num_rows)]
    logs += [generated(preset, samples) for preset in preset_names()]
    for name in ("laia", "esd:1", "joint"):
        run(replace(logs[0], batches=logs[0].batches[: WARM_UP + 2]), name)  # compiles
    print_costs(logs)
    print_slowest_links(logs)
    plot_cost_against_time([log for log in logs if log.name in ("criteo", "avazu", "movielens-1m")])


if __name__ == "__main__":
    main()
