"""What planning costs the rank that does it, in CPU time: looking ids up, deciding, telling the others.

python benchmarks/planning.py

Batches of the Criteo-like log, 26 ids a sample, for two co-located workers with a look-ahead of two.
`fill` turns ids around and finds their rows,
`plan` decides; `compare` is the hash of samples and plan by which ranks agree, `share` packs a plan and maps
it again. CPU time of the thread, so that what else runs on the machine matters little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from figures.traces import Trace, generated
from report import print_machine, print_table
from rowhaul import _environment
from rowhaul.data.samples import Samples
from rowhaul.planning.packing import PlanFiles, unpack
from rowhaul.planning.planner import PlannedBatch, samples_digest
from rowhaul.schedule import CacheSettings, IdBatch, RowSizes, Scheduler, ScheduleSettings, Topology

NUM_WORKERS = 2
SIZES = (1024, 4096, 16384)
DISPATCHERS = ("round-robin", "random", "laia", "esd:1", "joint")
ITERATIONS, WARM_UP = 60, 20
DENSE_COLUMNS = 13
PARTS = ("fill", "plan", "compare", "share")


def samples_of(trace: Trace, batch: int) -> list[Samples]:
    """The batches of a trace as a reader yields them."""
    made = []
    for start in range(0, len(trace) - batch + 1, batch):
        part = slice(start, start + batch)
        lengths = np.stack([has[part] for has in trace.present]).astype(np.int32)
        values = [keys[part][has[part]] for keys, has in zip(trace.keys, trace.present, strict=True)]
        dense, labels = np.zeros((batch, DENSE_COLUMNS), np.float32), np.zeros(batch, np.float32)
        index = np.arange(start, start + batch)
        made.append(Samples(trace.columns, np.concatenate(values), lengths, dense, labels, index))
    return made


def measure(batches: list[Samples], settings: ScheduleSettings) -> npt.NDArray[np.float64]:
    """CPU milliseconds of each part, the medians over the iterations after the first ones."""

    def ids() -> Iterator[IdBatch]:
        for samples in batches:
            yield IdBatch.from_features(range(len(samples.features)), samples.values, samples.lengths)

    scheduler = Scheduler(settings, ids())
    files, spent = PlanFiles(), []
    while True:
        times = [time.thread_time()]
        if not scheduler.fill():
            break
        times.append(time.thread_time())
        plan = scheduler.plan()
        times.append(time.thread_time())
        samples = batches[plan.iteration]
        plan = replace(plan, ids=None)  # ranks compare, and those of a host get, plans without them
        planned = PlannedBatch(plan, samples, samples_digest(samples), plan.digest(), 0.0, 0.0)
        times.append(time.thread_time())
        number, file, size = files.pack(planned, [0])
        unpack(file, size)
        files.give_back(number, 0)
        times.append(time.thread_time())
        spent.append(np.diff(times))
    files.close()
    medians: npt.NDArray[np.float64] = np.median(spent[WARM_UP:-1], axis=0) * 1e3
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="samples of a global batch")
    parser.add_argument("--dispatchers", nargs="+", default=DISPATCHERS)
    parser.add_argument("--policy", default="lru", help="what caches evict")
    parser.add_argument("--cache", type=int, default=2_000_000, help="rows of each worker's cache")
    given = parser.parse_args()
    _environment.keep_freed_memory()
    print_machine()
    for size in given.sizes:
        trace = generated("criteo", size * ITERATIONS)
        batches = samples_of(trace, size)
        num_ids = sum(len(samples.values) for samples in batches) / len(batches)
        rows = []
        for dispatcher in given.dispatchers:
            settings = ScheduleSettings(
                topology=Topology(NUM_WORKERS, colocated=True),
                sizes=RowSizes(values=(64,) * trace.num_tables, state=(4,) * trace.num_tables),
                prices=(1,) * NUM_WORKERS,
                cache=CacheSettings(given.cache, policy=given.policy),
                dispatcher=dispatcher,
                look_ahead=2,
            )
            parts = measure(batches, settings)
            decided = parts[0] + parts[1]
            rows.append([dispatcher, *parts, decided, decided * 1e6 / num_ids])
        print_table(
            f"CPU ms an iteration: {size:,} samples x {trace.num_tables} ids, {NUM_WORKERS} workers",
            ["dispatcher", *PARTS, "fill + plan", "ns per id"],
            rows,
        )


if __name__ == "__main__":
    main()
