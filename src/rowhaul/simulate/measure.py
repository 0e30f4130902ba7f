"""One mechanism over one trace: run the scheduler, count, and time it with the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from rowhaul.errors import DataError
from rowhaul.schedule import IdBatch, Scheduler, ScheduleSettings
from rowhaul.schedule.dispatch import Dispatcher, make_dispatcher
from rowhaul.schedule.dispatch.adaptive import LaiaAdaptive
from rowhaul.schedule.dispatch.joint import MOST_PASSES, PASSES, Joint
from rowhaul.schedule.dispatch.two_batches import TwoBatches
from rowhaul.schedule.plan import Kind, Plan, RowCounts
from rowhaul.schedule.sizes import apportion
from rowhaul.simulate.clock import Clock, TimeModel
from rowhaul.simulate.links import Floats
from rowhaul.simulate.results import Outcome

Batches = Callable[[], Iterable[IdBatch]]
MakeScheduler = Callable[[ScheduleSettings, Iterable[IdBatch]], Scheduler]
COMPILING_ITERATIONS = 3  # enough to have called every kernel
OBSERVED_DECISIONS = 8  # between two looks at the clock; a record needs two iterations to take effect
COMFORTABLE = 0.8  # of the budget; below, one more table is tried


@dataclass(frozen=True)
class Span:
    """Which iterations of the trace count: all up to ``iterations``, without the first ``warmup``."""

    iterations: int
    warmup: int


def measure(
    batches: Batches,
    batch_size: int,
    schedule: ScheduleSettings,
    model: TimeModel,
    span: Span,
    progress: Callable[[int], None] = lambda done: None,
    decision_budget: float | None = None,
    make_scheduler: MakeScheduler = Scheduler,
) -> Outcome:
    """Run ``schedule`` over the trace's first iterations; averages are taken after the warm-up.

    Arguments are those of `Simulation`; ``progress`` is called with the number of iterations done.
    """
    shares = apportion(batch_size, schedule.shares or (1,) * schedule.topology.num_workers)
    clock: Clock | None = None
    tally = _Tally(schedule.topology.num_workers, np.array(model.compute_seconds))
    budget = _budget(schedule, decision_budget)
    cost, slowest, decisions, lookups, seconds = [], [], [], [], []
    source = _TimedSource(islice(batches(), span.iterations))
    scheduler = make_scheduler(schedule, source)
    while True:
        began, reading = time.perf_counter(), source.seconds
        if not scheduler.fill():
            break
        filled = time.perf_counter()
        plan = scheduler.plan()
        decisions.append(time.perf_counter() - filled)
        lookups.append(filled - began - (source.seconds - reading))
        if budget and (value := budget.observe(decisions[-1])) is not None:
            scheduler.post(budget.name, value)
        if clock is None:  # the plan knows who sums: worker 0 always does, and a restored scheduler's shares
            clock = Clock(model, plan.summing_workers)
        link_seconds = clock.link_seconds(plan)
        cost.append(link_seconds.sum())
        slowest.append(link_seconds.max())
        previous = clock.observe(plan)
        if previous is not None:
            seconds.append(previous)
        if len(cost) > span.warmup:
            tally.add(plan, link_seconds)
        progress(len(cost))
    if clock is None or not tally.iterations:
        raise DataError(
            f"the data holds {len(cost):,} batches of {batch_size:,} samples: nothing is left to measure "
            f"after a warm-up of {span.warmup:,} iterations; lower the warm-up or give more data"
        )
    seconds.append(clock.finish())
    dispatcher = schedule.dispatcher
    return tally.outcome(
        dispatcher if isinstance(dispatcher, str) else dispatcher.name,
        tuple(shares.tolist()),
        [np.array(series) for series in (cost, slowest, seconds, decisions, lookups)],
    )


def _budget(schedule: ScheduleSettings, decision_budget: float | None) -> DecisionBudget | None:
    adapted = None if decision_budget is None else adapted_setting(schedule.dispatcher)
    if decision_budget is None or adapted is None:
        return None
    if adapted == "passes":
        return DecisionBudget(adapted, PASSES, MOST_PASSES, decision_budget)
    num_tables = len(schedule.sizes.values)
    return DecisionBudget(adapted, num_tables, num_tables, decision_budget)


def adapted_setting(dispatcher: str | Dispatcher) -> Literal["tables_scored", "passes"] | None:
    """The setting that a dispatcher, or one that it wraps, leaves to the time there is, if it has one."""
    made = make_dispatcher(dispatcher) if isinstance(dispatcher, str) else dispatcher
    while isinstance(made, TwoBatches):
        made = made.inner
    if isinstance(made, LaiaAdaptive) and made.tables_scored is None:
        return "tables_scored"
    return "passes" if isinstance(made, Joint) and made.passes == "auto" else None


def compile_kernels(
    batches: Batches, schedule: ScheduleSettings, make_scheduler: MakeScheduler = Scheduler
) -> None:
    """Call everything once, so that the times measured later are those of decisions."""
    scheduler = make_scheduler(schedule, islice(batches(), COMPILING_ITERATIONS))
    while scheduler.fill():
        scheduler.plan()


class _TimedSource:
    """Passes batches on and adds up how long it took to get them, which is no part of scheduling."""

    def __init__(self, batches: Iterable[IdBatch]) -> None:
        self.seconds = 0.0
        self._batches = iter(batches)

    def __iter__(self) -> _TimedSource:
        return self

    def __next__(self) -> IdBatch:
        began = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.seconds += time.perf_counter() - began


class _Tally:
    """Sums over the iterations that count."""

    def __init__(self, num_workers: int, compute_seconds: Floats) -> None:
        self.iterations = 0
        self._compute_seconds = compute_seconds
        self._rows = np.zeros((len(Kind), num_workers))
        self._bytes = np.zeros((len(Kind), num_workers))
        self._link_seconds = np.zeros(num_workers)
        self._samples = np.zeros(num_workers)
        self._all_reduce = np.zeros(2)  # rows, bytes
        self._hits = self._lookups = 0
        self._num_summing = 0
        self._row_counts = RowCounts()

    def add(self, plan: Plan, link_seconds: Floats) -> None:
        rows, num_bytes = plan.counts()
        self.iterations += 1
        self._rows += rows
        self._bytes += num_bytes
        self._link_seconds += link_seconds
        self._samples += np.bincount(plan.worker, minlength=plan.num_workers)
        self._all_reduce += plan.all_reduce_rows, plan.all_reduce_bytes
        self._hits += int(plan.hits.sum())
        self._lookups += int(plan.lookups.sum())
        self._num_summing = len(plan.summing_workers)
        self._row_counts += RowCounts.of_plan(plan)

    def outcome(self, dispatch: str, shares: tuple[int, ...], series: list[Floats]) -> Outcome:
        each = 1 / self.iterations
        all_reduce_rows, all_reduce_bytes = (self._all_reduce * each).tolist()
        cost, slowest, seconds, decisions, lookups = series
        return Outcome(
            name=dispatch,
            dispatch=dispatch,
            shares=shares,
            iterations=self.iterations,
            rows=self._rows * each,
            bytes=self._bytes * each,
            all_reduce_rows=all_reduce_rows,
            all_reduce_bytes=all_reduce_bytes,
            link_seconds=self._link_seconds * each,
            compute_seconds=self._samples * self._compute_seconds * each,
            alone_seconds=float(self._samples.sum() * self._compute_seconds.min() * each),
            num_summing=self._num_summing,
            hit_ratio=self._hits / self._lookups if self._lookups else 1.0,
            cost_series=cost,
            slowest_link_series=slowest,
            iteration_series=seconds,
            decision_series=decisions,
            lookup_series=lookups,
            row_counts={name: count * each for name, count in vars(self._row_counts).items()},
        )


class DecisionBudget:
    """Decides how much a dispatcher may do: as much as a decision has time for (Herald, 4.3).

    `laia-adaptive` scores as many tables, `joint:auto` makes as many passes. Measured times enter a schedule
    only as control records, so this decides and the caller posts.

    Args:
        name: the setting, and its control record.
        value: what the dispatcher starts with.
        most: what it may do at most.
        budget_seconds: for a decision.
    """

    def __init__(self, name: str, value: int, most: int, budget_seconds: float) -> None:
        self.name = name
        self._value, self._most = value, most
        self._budget = budget_seconds
        self._recent: list[float] = []

    def observe(self, decision_seconds: float) -> int | None:
        """Add the time of one decision; returns the value to use from now on if it changes."""
        self._recent.append(decision_seconds)
        if len(self._recent) < OBSERVED_DECISIONS:
            return None
        typical = statistics.median(self._recent)
        self._recent.clear()
        before = self._value
        if typical > self._budget:
            self._value = min(before - 1, int(before * self._budget / typical))
        elif typical < COMFORTABLE * self._budget:
            self._value = before + 1
        self._value = min(max(self._value, 0), self._most)
        return self._value if self._value != before else None
