"""How many rows to replicate on every worker: the performance model of two-fold parallelism.

Replicated rows save their moves and cost a sum over the workers. HypeReca (section 5.2) prices both by
frequencies alone: L(R) = R C_ar + N (1 - rho(R)) C_a2a. Here only the rows that a batch touches are summed,
rows move once a worker, caches hold them and dispatchers gather them; so what is summed and what moves with
R rows comes from the very scheduler, run over some batches, and what that takes from the clock of the
simulator, whose links and sums are those measured. The search is theirs: ternary, then all that is near.

Rows are ranked by some batches and predicted on others: batches touch more of the rows that were chosen for
being in them than those that come later will (a sixth more, of 32,768 rows counted in 60 batches). Where a
run is under way, predictions begin with what its caches hold: from empty ones fewer rows move, for as long as
nobody has trained those that come and nothing is evicted, which may be hundreds of iterations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CacheTooSmallError, DataError
from rowhaul.schedule import HotRows, IdBatch, Scheduler, ScheduleSettings
from rowhaul.schedule.settings import NO_ROWS
from rowhaul.simulate.clock import TimeModel
from rowhaul.simulate.measure import Span, measure
from rowhaul.simulate.trace import RowCounter

FEWEST = 16  # rows of the smallest set that is tried
FINENESS = 3  # steps of sizes tried near the best, between it and each of its neighbours
AS_GOOD = 1.005  # a set this near the best is as good, and the smallest of those is chosen


@dataclass(frozen=True)
class Processors:
    """What ranks that share processors keep them busy with: no iteration is shorter than that."""

    seconds: float = 0.0  # of an iteration in which no row moves and none is summed
    per_moved_row: float = 0.0
    per_summed_row: float = 0.0

    def busy(self, moved_rows: float, summed_rows: float) -> float:
        """Seconds of an iteration."""
        return self.seconds + self.per_moved_row * moved_rows + self.per_summed_row * summed_rows


@dataclass(frozen=True)
class Beginning:
    """A run under way, some of the batches that a model is given behind it."""

    num_batches: int
    state: Mapping[str, npt.NDArray[Any]]  # of its scheduler, as that exports it
    hot: HotRows | None  # replicated at that moment

    def scheduler(self, settings: ScheduleSettings, batches: Iterable[IdBatch]) -> Scheduler:
        """A scheduler that continues from there with the replicated rows of the settings."""
        scheduler = Scheduler(replace(settings, hot=self.hot), batches)
        scheduler.restore(self.state)
        scheduler.replicate(settings.hot or NO_ROWS)
        return scheduler


@dataclass(frozen=True)
class Prediction:
    """What replicating some rows comes to, per iteration."""

    num_rows: int
    coverage: float  # rho: the share of accesses that name a replicated row
    summed_rows: float  # replicated rows that a batch touches
    summed_bytes: float
    moved_rows: float  # of all kinds, between ranks
    moved_bytes: float
    seconds: float


class HotModel:
    """Predicts iterations with different numbers of replicated rows, the most frequent ones first.

    Args:
        batches: ids of consecutive global batches, all of which are counted to know the rows to replicate.
            A prediction is for rows ranked by those batches alone that it is not measured on.
        schedule: the settings of the scheduler; its hot rows do not count.
        model: links, compute and sums, as measured.
        scheduled: how many of the batches, the last ones, are scheduled for every prediction.
        warmup: of these, those at the beginning that fill the caches; predictions are of the others.
        processors: what keeps them busy, where several ranks share them.
        beginning: where scheduling begins: just before the scheduled batches; None: with empty caches. Rows
            to replicate are then ranked by the batches before those of predictions, too: the others are
            still to come.
    """

    def __init__(
        self,
        batches: Sequence[IdBatch],
        schedule: ScheduleSettings,
        model: TimeModel,
        scheduled: int,
        warmup: int,
        processors: Processors = Processors(),
        beginning: Beginning | None = None,
    ) -> None:
        if not warmup < scheduled <= len(batches):
            raise DataError(
                f"of {len(batches)} batches {scheduled} cannot be scheduled, {warmup} of them to warm up"
            )
        if beginning is not None and beginning.num_batches != len(batches) - scheduled:
            raise DataError(
                f"the run is {beginning.num_batches} batches on, and {scheduled} of {len(batches)} are to be "
                "scheduled: scheduling must begin where the run is"
            )
        self._beginning = beginning
        self._batches, self._warmup = batches[-scheduled:], warmup
        self._schedule = replace(schedule, hot=None)
        self.times, self.processors = model, processors
        num_tables, measured = len(schedule.sizes.values), scheduled - warmup
        # Where all batches are scheduled and none warms up, there are no others to rank rows by.
        self._others = _counted(batches[:-measured] or batches, num_tables)
        self._counter = self._others if beginning is not None else _counted(batches, num_tables)
        self._measured = _counted(batches[-measured:], num_tables)
        self.overhead = 0.0  # seconds of every iteration that the model does not explain, as measured
        self.num_accesses = sum(len(batch.keys) for batch in batches[-measured:])
        self._predictions: dict[int, Prediction] = {}

    def rows(self, count: int) -> HotRows:
        """The most frequent rows of all batches that were trained: those to replicate."""
        return self._counter.most_frequent(count)

    def rows_before(self, count: int) -> HotRows:
        """The most frequent rows of the batches that predictions are not measured on."""
        return self._others.most_frequent(count)

    def most(self, largest: int) -> int:
        """As many rows as may be replicated: no more than ``largest``, and than something is known of."""
        return min(largest, int(self._others.num_distinct().sum()))

    def predict(self, count: int) -> Prediction:
        """An iteration with the ``count`` most frequent rows replicated."""
        if count not in self._predictions:
            self._predictions[count] = self.predict_rows(self.rows_before(count))
        return self._predictions[count]

    def predict_rows(self, hot: HotRows) -> Prediction:
        """An iteration with these replicated rows."""
        size = max(len(batch) for batch in self._batches)
        schedule = replace(self._schedule, hot=hot if len(hot) else None)
        span = Span(len(self._batches), self._warmup)
        coverage = self._coverage(hot)
        try:
            make = Scheduler if self._beginning is None else self._beginning.scheduler
            outcome = measure(lambda: self._batches, size, schedule, self.times, span, make_scheduler=make)
        except CacheTooSmallError:  # with more replicated rows it may do
            return Prediction(len(hot), coverage, 0.0, 0.0, 0.0, 0.0, math.inf)
        moved_rows = float(outcome.rows.sum())
        # Beside the last iteration nothing travels early, as there is no next one: it is shorter than others.
        series = outcome.iteration_series[self._warmup :]
        seconds = float(np.mean(series[:-1] if len(series) > 1 else series))
        return Prediction(
            len(hot),
            coverage,
            outcome.all_reduce_rows,
            outcome.all_reduce_bytes,
            moved_rows,
            float(outcome.bytes.sum()),
            self.overhead + max(seconds, self.processors.busy(moved_rows, outcome.all_reduce_rows)),
        )

    def choose(self, largest: int) -> Prediction:
        """The number of rows with the shortest predicted iteration, as a prediction; it may be 0."""
        most = self.most(largest)
        sizes = _sizes(most)
        if sizes:
            best = _ternary(sizes, lambda size: self.predict(size).seconds)
            for size in _near(sizes, best):
                self.predict(size)
        self.predict(0)
        shortest = min(one.seconds for one in self._predictions.values())
        good = [one for one in self._predictions.values() if one.seconds <= AS_GOOD * shortest]
        return min(good, key=lambda one: one.num_rows)

    @property
    def tried(self) -> list[Prediction]:
        """All predictions so far, the smallest set first."""
        return sorted(self._predictions.values(), key=lambda one: one.num_rows)

    def _coverage(self, hot: HotRows) -> float:
        ranked, times = self._measured.ranked(int(self._measured.num_distinct().sum()))
        covered = 0
        for table in np.unique(hot.tables):
            here = ranked.tables == table
            held = np.isin(ranked.keys[here], hot.keys[hot.tables == table])
            covered += int(times[here][held].sum())
        return covered / max(self.num_accesses, 1)


def _counted(batches: Sequence[IdBatch], num_tables: int) -> RowCounter:
    counter = RowCounter(num_tables)
    for batch in batches:
        order = np.argsort(batch.tables, kind="stable")
        tables, starts = np.unique(batch.tables[order], return_index=True)
        for table, keys in zip(tables.tolist(), np.split(batch.keys[order], starts[1:]), strict=True):
            counter.add(table, keys)
    return counter


def _sizes(most: int) -> list[int]:
    """Powers of two up to the largest set, and that."""
    if most < 1:
        return []
    powers = [FEWEST << shift for shift in range(64) if FEWEST << shift < most]
    return [*powers, most]


def _ternary(sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The place of the smallest value of a function that falls, then rises."""
    low, high = 0, len(sizes) - 1
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        # What is infinite on both sides has too few rows: caches hold the others with more (`predict_rows`).
        if math.inf > seconds(sizes[left]) <= seconds(sizes[right]):
            high = right - 1
        else:
            low = left + 1
    return min(range(low, high + 1), key=lambda place: seconds(sizes[place]))


def _near(sizes: Sequence[int], best: int) -> list[int]:
    """Sizes between the best one and its neighbours, evenly by their logarithms."""
    ends = [sizes[max(best - 1, 0)], sizes[best], sizes[min(best + 1, len(sizes) - 1)]]
    found = {
        round(math.exp(math.log(low) + (math.log(high) - math.log(low)) * step / FINENESS))
        for low, high in ((ends[0], ends[1]), (ends[1], ends[2]))
        for step in range(1, FINENESS)
    }
    return sorted(found - {0})
