"""Which shares to try: the simulator's proposals, from measured links and compute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError
from rowhaul.nn import TableCollection
from rowhaul.runtime.runtime import MEASURES
from rowhaul.schedule import IdBatch, Scheduler, ScheduleSettings
from rowhaul.schedule.directory.distinct import distinct_by_appearance
from rowhaul.simulate.clock import TimeModel
from rowhaul.simulate.measure import Span, measure
from rowhaul.simulate.results import Outcome
from rowhaul.simulate.shares import (
    Candidate,
    Objective,
    Runs,
    Shares,
    balance,
    equal_shares,
    subset_candidates,
)
from rowhaul.train.distributed.tables import ids_of, layout_of
from rowhaul.tuning.shares.links import MeasuredLinks
from rowhaul.tuning.shares.trial import ShareCandidate

TRIED_BATCHES = 60  # most, in the simulator
LEAST_BATCHES = 12
WARM_UP = 1 / 3  # of these fill caches
SEARCH_SECONDS = 3.0  # of rank 0, about, while training waits
SIMULATED_RUNS = 20  # of a search, about
WORTH_TRYING = 0.99  # of the best subset's time: unequal shares must be predicted to be quicker
LEAST_DIFFERENCE = 0.05  # of the samples that unequal shares must give to others than equal ones do
FILLED = 2 / 3  # of a cache that the batches simulated may need: later ones may need more
FEWER = 0.8  # of the samples for which a cache had no room in training
# A worker with less than this part of an equal share is not worth its messages, and the simulator's times are
# not that exact.
LEAST_SHARE = 0.02

Measures = npt.NDArray[np.float64]  # workers x `MEASURES`


@dataclass(frozen=True)
class Costs:
    """What the simulator knows of the run besides links.

    Args:
        compute_seconds: of a sample on each worker.
        dense_bytes: that are summed in every iteration.
        dense_seconds: of that sum as measured, where it has links of its own; None: it shares those of rows.
    """

    compute_seconds: tuple[float, ...]
    dense_bytes: int = 0
    dense_seconds: float | None = None

    @classmethod
    def observed(
        cls,
        measures: Sequence[Measures],
        dense_bytes: int,
        *,
        shared_links: bool,
        before: Costs | None = None,
    ) -> Costs:
        """Take compute, and sums if they have links of their own, from measured iterations.

        Of workers that have not trained, what was known ``before`` counts.
        """
        compute = seconds_per_sample(measures)
        trained = np.stack(measures)[:, :, MEASURES.index("samples")].any(axis=0)
        if before is not None:
            compute = tuple(np.where(trained, compute, before.compute_seconds).tolist())
        if shared_links:
            return cls(compute, dense_bytes)
        if before is not None and trained.sum() < 2:  # nothing was summed
            return cls(compute, dense_bytes, before.dense_seconds)
        return cls(compute, dense_bytes, sum_seconds(measures))

    def time_model(self, settings: ScheduleSettings, links: MeasuredLinks) -> TimeModel:
        """The simulator's model of the run."""
        dense_bytes = self.dense_bytes if self.dense_seconds is None else 0
        return TimeModel(
            links.for_time_model(settings),
            self.compute_seconds,
            dense_bytes=dense_bytes,
            dense_seconds=self.dense_seconds,
        )


def propose(
    settings: ScheduleSettings,
    batches: Sequence[IdBatch],
    links: MeasuredLinks,
    costs: Costs,
    too_many: int | None = None,
) -> list[ShareCandidate]:
    """Propose at most three candidates: one machine, the best subset in equal shares, unequal shares.

    Rank 0 never leaves, so that it is the one machine, and in every subset. Shares whose rows might not fit
    into the caches are not proposed; ``too_many`` samples on one worker are known not to. Equal shares of
    all workers always may: the run would have them anyway.
    """
    model = costs.time_model(settings, links)
    return _Search(replace(settings, shares=None), batches, model, too_many).found()


class _Search:
    """Simulates shares on the first batches of the data."""

    def __init__(
        self,
        settings: ScheduleSettings,
        batches: Sequence[IdBatch],
        model: TimeModel,
        too_many: int | None = None,
    ) -> None:
        self._settings, self._model, self._too_many = settings, model, too_many
        self._known = list(batches)
        self._most_ids = max(int(np.diff(one.offsets).max(initial=0)) for one in batches)  # of a sample
        self._batch_size = len(batches[0].offsets) - 1
        self._num_workers = settings.topology.num_workers
        self._dispatcher = str(settings.dispatcher)
        self._batches = list(batches[:LEAST_BATCHES])
        self._objective = Objective(model.computes)
        self._runs = Runs(self._run, self._objective)
        self._runs.outcome(self._equal(range(self._num_workers)))  # kernels may have to be loaded
        began = time.perf_counter()
        self._run(*self._equal(range(self._num_workers)))
        each = (time.perf_counter() - began) / len(self._batches)
        affordable = int(SEARCH_SECONDS / SIMULATED_RUNS / max(each, 1e-9))
        self._batches = list(batches[: max(affordable, LEAST_BATCHES)])
        self._runs = Runs(self._run, self._objective)

    def found(self) -> list[ShareCandidate]:
        """The candidates."""
        candidates = []
        if self._fits(self._equal([0])):
            candidates.append(ShareCandidate(self._equal([0])[1], self._dispatcher, "one machine"))
        subset = self._best_subset()
        if subset is not None:
            kind = f"{_num_used(subset)} workers, equal shares"
            candidates.append(ShareCandidate(subset[1], self._dispatcher, kind))
        unequal = self._best_unequal(subset)
        if unequal is not None:
            candidates.append(ShareCandidate(unequal[1], unequal[0], "unequal shares"))
        return candidates

    def _equal(self, workers: Sequence[int]) -> Candidate:
        return self._dispatcher, equal_shares(workers, self._num_workers, self._batch_size)

    def _best_subset(self) -> Candidate | None:
        """The best of rank 0 with one worker or more."""
        everyone = self._equal(range(self._num_workers))
        subsets = subset_candidates(self._runs, everyone, self._model)
        several = [one for one in subsets if _num_used(one) > 1]
        return next(filter(self._fits, self._runs.ranked(several)), None)

    def _best_unequal(self, subset: Candidate | None) -> Candidate | None:
        """Shares that even out the workers' times, where that is predicted to help."""
        if subset is None:
            return None
        starts = dict.fromkeys([self._equal(range(self._num_workers))[1], subset[1]])
        steps = [
            (self._dispatcher, _without_tiny(shares))
            for start in starts
            for shares in balance(self._runs, self._dispatcher, start, self._model)
        ]
        limit = WORTH_TRYING * self._objective(self._runs.require(subset))
        for one in self._runs.ranked(dict.fromkeys(steps)):
            if self._objective(self._runs.require(one)) > limit:
                return None
            moved = np.abs(np.subtract(one[1], subset[1])).sum() / 2
            if _num_used(one) > 1 and moved >= LEAST_DIFFERENCE * self._batch_size and self._fits(one):
                return one
        return None

    def _fits(self, candidate: Candidate) -> bool:
        """Whether caches will hold the rows of these shares.

        They do if all ids of a share's samples may differ; otherwise there must be much to spare.
        """
        dispatcher, shares = candidate
        if candidate == self._equal(range(self._num_workers)):
            return True
        if self._too_many is not None and max(shares) > FEWER * self._too_many:
            return False
        capacities = self._settings.cache.capacities(self._num_workers)
        room = 1 if self._settings.cache.unit == "rows" else max(self._settings.sizes.records)
        if (np.array(shares) * self._most_ids * room <= capacities).all():
            return True
        filled = tuple(int(FILLED / self._growth * one) for one in capacities.tolist())
        cache = replace(self._settings.cache, capacity=filled)
        settings = replace(self._settings, dispatcher=dispatcher, shares=shares, cache=cache)
        scheduler = Scheduler(settings, self._batches)
        try:
            while scheduler.fill():
                scheduler.plan()
        except ConfigError:
            return False
        return True

    @cached_property
    def _growth(self) -> float:
        """How many times the rows of any batch simulated the largest batch known has.

        On a slow machine, few batches are simulated.
        """
        num_tables = len(self._settings.sizes.values)
        found = [len(distinct_by_appearance(one.tables, one.keys, num_tables)[1]) for one in self._known]
        return max(found) / max(max(found[: len(self._batches)]), 1)

    def _run(self, dispatcher: str, shares: Shares) -> Outcome:
        settings = replace(self._settings, dispatcher=dispatcher, shares=shares)
        count = len(self._batches)
        span = Span(count, min(int(WARM_UP * count), count - 1))
        return measure(lambda: self._batches, self._batch_size, settings, self._model, span)


def _num_used(candidate: Candidate) -> int:
    return sum(share > 0 for share in candidate[1])


def _without_tiny(shares: Shares) -> Shares:
    """Leave out workers with hardly a sample; the largest share takes theirs."""
    least = LEAST_SHARE * sum(shares) / len(shares)
    kept = [share if share >= least else 0 for share in shares]
    kept[int(np.argmax(kept))] += sum(shares) - sum(kept)
    return tuple(kept)


def first_batches(stream: SampleStream, collection: TableCollection) -> list[IdBatch]:
    """Read the ids of the batches to simulate, as the scheduler will see them."""
    beginning = stream.from_beginning(TRIED_BATCHES * stream.batch_size)
    return layout_of(collection).records_read([ids_of(collection, samples) for samples in beginning])


def seconds_per_sample(observed: Sequence[Measures]) -> tuple[float, ...]:
    """Return the compute time of a sample on each worker; the median for one that has trained none."""
    compute, samples = MEASURES.index("compute"), MEASURES.index("samples")
    every = np.stack(observed)  # iterations x workers x measures
    trained = every[:, :, samples]
    each = np.divide(every[:, :, compute], trained, out=np.full(trained.shape, np.nan), where=trained > 0)
    typical = np.full(each.shape[1], np.nan)
    active = np.isfinite(each).any(axis=0)
    typical[active] = np.nanmedian(each[:, active], axis=0)
    others = float(np.median(typical[active])) if active.any() else 0.0
    return tuple(np.where(active, typical, others).tolist())


def sum_seconds(observed: Sequence[Measures]) -> float:
    """Return the time of the dense sum: that of the last worker to arrive, which waits for nothing else.

    Only workers that have trained were waiting.
    """
    every = np.stack(observed)
    trained = every[:, :, MEASURES.index("samples")] > 0
    waited = np.where(trained, every[:, :, MEASURES.index("all_reduce")], np.inf).min(axis=1)
    return float(np.median(waited[np.isfinite(waited)])) if trained.any() else 0.0
