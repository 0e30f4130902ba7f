"""How many samples a second a host can plan, in CPU time: finding rows, deciding, telling the others.

python benchmarks/planning.py
python benchmarks/planning.py --runs 8x4096 --dispatchers round-robin --threads 1 2 --cache 60000

Batches of the Criteo-like log, 26 features a sample, for co-located workers with a look-ahead of two, written
as WORKERSxSAMPLES a worker. `distinct` finds the distinct rows of a batch, `look-up` their slots in the
directory (both when a batch enters the window), `dispatch` divides the samples, `caches` finds and evicts
copies, `moves` is the transitions of row states and the moves they cause, `rest` all other planning.
`compare` is the hash of samples and plan by which ranks agree, `share` packs a plan and maps it again: they
are not in the rate.

Only CPU time is counted, so that what else runs on the machine matters little. With several threads, every
step that they share counts as divided evenly: what the machine would need with a free core for each. Caches
are full (`--cache`, in rows) or not: evictions cost as much as moves.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

import rowhaul.schedule.directory.directory as directory
from figures.traces import Trace, generated
from report import print_machine, print_table
from rowhaul import _environment
from rowhaul.data.samples import Samples
from rowhaul.planning.packing import PlanFiles, unpack
from rowhaul.planning.planner import PlannedBatch, samples_digest
from rowhaul.schedule import CacheSettings, IdBatch, RowSizes, Scheduler, ScheduleSettings, Topology
from rowhaul.schedule.caches import Caches
from rowhaul.schedule.dispatching import Dispatching
from rowhaul.schedule.sync.exact import ExactExchange
from rowhaul.schedule.threads import Threads

RUNS = ("2x2048", "8x4096", "64x2048")
DISPATCHERS = ("round-robin", "random", "laia", "esd:1", "joint")
ITERATIONS = 24
DENSE_COLUMNS = 13
PLANNING = ("distinct", "look-up", "dispatch", "caches", "moves", "rest")
PARTS = (*PLANNING, "compare", "share")


class Clock:
    """CPU seconds of this thread; where threads share work, as if all ran side by side from the beginning."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._beside = 0.0  # what helpers took beyond this thread
        share = Threads.share

        def timed_share(threads: Threads, work: Callable[[Any], object], num_chunks: int) -> None:
            took: list[float] = []

            def timed(counter: Any) -> None:
                began = time.thread_time()
                work(counter)
                took.append(time.thread_time() - began)

            began = time.thread_time()
            share(threads, timed, num_chunks)
            parts = min(threads.count, max(num_chunks, 1))
            self._beside += sum(took) / parts - (time.thread_time() - began)

        Threads.share = timed_share  # type: ignore[method-assign]  # a benchmark looks inside

    def now(self) -> float:
        return time.thread_time() + self._beside

    def count(self, owner: Any, name: str, part: str, but: str = "") -> None:
        """Count what a function takes as a part, less what another part inside it does."""
        call = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            began, inside = self.now(), self.spent[but]
            result = call(*given, **named)
            self.spent[part] += self.now() - began - (self.spent[but] - inside if but else 0.0)
            return result

        setattr(owner, name, timed)


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


def measure(
    clock: Clock, batches: list[Samples], settings: ScheduleSettings, threads: int
) -> npt.NDArray[np.float64]:
    """CPU milliseconds of each of `PARTS`, the medians over the later iterations."""

    def ids() -> Iterator[IdBatch]:
        for samples in batches:
            yield IdBatch.from_features(range(len(samples.features)), samples.values, samples.lengths)

    scheduler = Scheduler(settings, ids())
    scheduler.use_threads(threads)
    files, spent = PlanFiles(), []
    while True:
        clock.spent.clear()
        began = clock.now()
        if not scheduler.fill():
            break
        plan = scheduler.plan()
        decided = clock.now()
        clock.spent["rest"] = decided - began - sum(clock.spent[part] for part in PLANNING[:-1])
        samples = batches[plan.iteration]
        plan = replace(plan, ids=None)  # ranks compare, and those of a host get, plans without them
        planned = PlannedBatch(plan, samples, samples_digest(samples), plan.digest(), 0.0, 0.0)
        compared = clock.now()
        number, file, size = files.pack(planned, [0])
        unpack(file, size)
        files.give_back(number, 0)
        clock.spent["compare"], clock.spent["share"] = compared - decided, clock.now() - compared
        spent.append([clock.spent[part] for part in PARTS])
    files.close()
    settled = len(spent) // 3  # before that everything still grows
    medians: npt.NDArray[np.float64] = np.median(spent[settled : -settings.look_ahead - 1], axis=0) * 1e3
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=RUNS, help="workers x samples of each")
    parser.add_argument("--dispatchers", nargs="+", default=DISPATCHERS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--policy", default="lru", help="what caches evict")
    parser.add_argument("--cache", type=int, default=2_000_000, help="rows of each worker's cache")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    given = parser.parse_args()
    _environment.keep_freed_memory()
    print_machine()
    clock = Clock()
    for owner, name, part, but in (
        (directory, "find_rows", "distinct", ""),
        (directory, "distinct_rows", "distinct", ""),
        (directory.Directory, "locate", "look-up", "distinct"),
        (directory.Directory, "release", "look-up", ""),
        (Dispatching, "assign", "dispatch", ""),
        (Caches, "step", "caches", ""),
        (ExactExchange, "step", "moves", ""),
    ):
        clock.count(owner, name, part, but)
    for run in given.runs:
        num_workers, samples = map(int, run.split("x"))
        size = num_workers * samples
        trace = generated("criteo", size * given.iterations)
        batches = samples_of(trace, size)
        num_ids = sum(len(samples.values) for samples in batches) / len(batches)
        rows = []
        for dispatcher in given.dispatchers:
            settings = ScheduleSettings(
                topology=Topology(num_workers, colocated=True),
                sizes=RowSizes(values=(64,) * trace.num_tables, state=(4,) * trace.num_tables),
                prices=(1,) * num_workers,
                cache=CacheSettings(given.cache, policy=given.policy),
                dispatcher=dispatcher,
                look_ahead=2,
            )
            for threads in given.threads:
                parts = measure(clock, batches, settings, threads)
                decided = parts[: len(PLANNING)].sum()
                rows.append([dispatcher, threads, *parts, decided * 1e6 / num_ids, size / decided])
        print_table(
            f"CPU ms an iteration: {num_workers} workers x {samples:,} samples, "
            f"{num_ids / size:.1f} ids a sample, {given.cache:,} rows a cache",
            ["dispatcher", "threads", *PARTS, "ns per id", "1,000 samples/s"],
            rows,
        )


if __name__ == "__main__":
    main()
