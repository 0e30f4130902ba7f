"""One run of one mechanism on one trace: the scheduler's counts and the simulator's clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from figures.published import WARMUP
from figures.traces import Trace
from rowhaul.schedule import (
    CacheSettings,
    Dispatcher,
    DispatchTask,
    HotRows,
    Kind,
    Moves,
    Plan,
    RowSizes,
    Scheduler,
    ScheduleSettings,
    Topology,
    link_prices,
    make_dispatcher,
)
from rowhaul.schedule.dispatch.task import Learns
from rowhaul.schedule.plan import KIND_NAMES
from rowhaul.schedule.row_states import State
from rowhaul.simulate.clock import Clock, TimeModel
from rowhaul.simulate.links import Link, Links

BYTES_PER_VALUE = 4


@dataclass(frozen=True)
class Mechanism:
    """Who trains what, and when rows are synchronised."""

    name: str
    dispatcher: str
    sync: str = "on-demand"


VANILLA = Mechanism("vanilla", "random", "full")
HET = Mechanism("HET", "random", "bounded:0")  # both papers run it synchronously
FAE = Mechanism("FAE", "random", "static")
LAIA = Mechanism("LAIA", "laia")
JOINT = Mechanism("joint", "joint")
RANDOM = Mechanism("random", "random")


def esd(alpha: float) -> Mechanism:
    return Mechanism(f"ESD({alpha:g})", f"esd:{alpha:g}")


@dataclass(frozen=True)
class Setting:
    """The cluster and the model, as far as they matter."""

    links_gbit: tuple[float, ...]
    per_worker: int
    dim: int
    cache: float  # share of the trace's distinct rows that every worker can hold
    compute_seconds: float | None = None  # per sample; None: the lab's
    first_touch: bool = False  # rows never trained before cost nothing; the papers count them

    def but(self, **changes: Any) -> Setting:
        return replace(self, **changes)

    @property
    def num_workers(self) -> int:
        return len(self.links_gbit)

    @property
    def bytes_per_second(self) -> list[float]:
        return [gbit * 1e9 / 8 for gbit in self.links_gbit]

    @property
    def batch(self) -> int:
        return self.num_workers * self.per_worker


@dataclass(frozen=True)
class Result:
    """Means per iteration after the warm-up."""

    setting: Setting
    iterations: int
    rows: dict[str, list[float]]  # by kind, per worker
    cost_seconds: float
    slowest_link_seconds: float
    iteration_seconds: float
    hit_ratio: float
    pulls_by_state: dict[str, float]  # where the latest version of the pulled rows was before
    dispatch_cpu_ms: float  # of the dispatcher alone, median
    decision_ms: float  # CPU time of the whole decision, from ids to plan, median

    @property
    def pulls(self) -> float:
        return sum(self.rows["miss_pull"])

    @property
    def pushes(self) -> float:
        return sum(self.rows["update_push"]) + sum(self.rows["evict_push"])


class TimedDispatcher:
    """A dispatcher that notes how much processor time it took."""

    def __init__(self, inner: Dispatcher) -> None:
        self.name = inner.name
        self.cpu_ms: list[float] = []
        self._inner = inner

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        began = time.thread_time_ns()
        worker = self._inner.assign(task)
        self.cpu_ms.append((time.thread_time_ns() - began) / 1e6)
        return worker


@dataclass
class Lab:
    """Runs mechanisms, each combination once."""

    compute_seconds: float  # per sample
    _known: dict[tuple[str, int, Mechanism, Setting], Result] = field(default_factory=dict)

    def run(self, trace: Trace, mechanism: Mechanism, setting: Setting) -> Result:
        key = trace.name, len(trace), mechanism, setting
        if key not in self._known:
            self._known[key] = self._run(trace, mechanism, setting)
        return self._known[key]

    def _run(self, trace: Trace, mechanism: Mechanism, setting: Setting) -> Result:
        compute = self.compute_seconds if setting.compute_seconds is None else setting.compute_seconds
        links = Links.make(Topology(setting.num_workers), tuple(map(Link, setting.bytes_per_second)))
        clock = Clock(TimeModel(links, (compute,) * setting.num_workers), range(setting.num_workers))
        dispatcher = make_dispatcher(mechanism.dispatcher)
        timed = None if isinstance(dispatcher, Learns) else TimedDispatcher(dispatcher)
        settings = schedule_settings(trace, mechanism, setting, timed)
        scheduler = Scheduler(settings, list(trace.batches(setting.batch)()))
        pulls_by_state = {State.SPLIT.name: 0, State.HOME.name: 0}
        decisions_ms, seconds, link_seconds, rows, hits, lookups = [], [], [], [], 0, 0
        for plan, milliseconds in timed_plans(scheduler):
            decisions_ms.append(milliseconds)
            if plan.iteration < WARMUP:
                continue
            seconds.append(seconds_in_the_papers_order(plan, links, compute))
            link_seconds.append(clock.link_seconds(plan))
            rows.append(plan.counts()[0])
            for state in pulls_by_state:
                trainers = plan.trainers[plan.states == State[state]]
                pulls_by_state[state] += int(np.bitwise_count(trainers).sum())
            hits += int(plan.hits.sum())
            lookups += int(plan.lookups.sum())
        return Result(
            setting,
            len(seconds),
            dict(zip(KIND_NAMES, np.mean(rows, axis=0).tolist(), strict=True)),
            float(np.mean(np.sum(link_seconds, axis=1))),
            float(np.mean(np.max(link_seconds, axis=1))),
            statistics.fmean(seconds),
            hits / lookups,
            {state: count / len(seconds) for state, count in pulls_by_state.items()},
            statistics.median(timed.cpu_ms[WARMUP:]) if timed else math.nan,
            statistics.median(decisions_ms[WARMUP:]),
        )


def timed_plans(scheduler: Scheduler) -> Iterator[tuple[Plan, float]]:
    """All plans, each with the CPU milliseconds that it took, ids looked up included."""
    while True:
        began = time.thread_time()
        if not scheduler.fill():
            return
        plan = scheduler.plan()
        yield plan, 1e3 * (time.thread_time() - began)


def schedule_settings(
    trace: Trace, mechanism: Mechanism, setting: Setting, dispatcher: Dispatcher | None = None
) -> ScheduleSettings:
    """The scheduler's settings; ``dispatcher`` takes the place of the mechanism's."""
    capacity = int(setting.cache * trace.num_rows)
    return ScheduleSettings(
        topology=Topology(setting.num_workers),
        sizes=RowSizes((setting.dim * BYTES_PER_VALUE,) * trace.num_tables, (0,) * trace.num_tables),
        prices=link_prices(setting.bytes_per_second),
        cache=CacheSettings(capacity),
        dispatcher=dispatcher or mechanism.dispatcher,
        sync=mechanism.sync,
        first_touch=setting.first_touch,
        hot=most_popular(trace, capacity) if mechanism.sync == "static" else None,
    )


def seconds_in_the_papers_order(plan: Plan, links: Links, compute_seconds: float) -> float:
    """Seconds if all push, until the busiest link is done, then each worker pulls and computes.

    That is the papers' order, with a ring for replicated rows at the end. Our runtime lets these overlap,
    which is what the simulator's clock tells.
    """
    speeds, num_workers = links.rank_speeds(), plan.num_workers
    pulls = plan.moves.kind == Kind.MISS_PULL
    pushing = np.stack(link_seconds_of(plan.moves, ~pulls, speeds)).max()
    sending, receiving = link_seconds_of(plan.moves, pulls, speeds)
    # A worker may be the last that the stores serve.
    pulling = np.where(receiving > 0, np.maximum(receiving, sending.max()), 0.0)[:num_workers]
    computing = np.bincount(plan.worker, minlength=num_workers) * compute_seconds
    ring = 2 * (num_workers - 1) / num_workers * plan.all_reduce_bytes / speeds[:num_workers].min()
    return float(pushing + (pulling + computing).max() + ring)


def link_seconds_of(
    moves: Moves, chosen: npt.NDArray[np.bool_], speeds: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """How long some moves keep each rank's link busy, sending and receiving."""
    sent, received = (
        np.bincount(end[chosen], moves.num_bytes[chosen], len(speeds)) / speeds
        for end in (moves.source, moves.target)
    )
    return sent, received


def most_popular(trace: Trace, count: int) -> HotRows:
    """The rows that a profile of the whole trace would choose."""
    found = [
        np.unique(keys[has], return_counts=True) for keys, has in zip(trace.keys, trace.present, strict=True)
    ]
    tables = np.repeat(np.arange(len(found), dtype=np.int32), [len(keys) for keys, _ in found])
    keys = np.concatenate([keys for keys, _ in found])
    hot = np.argsort(-np.concatenate([counts for _, counts in found]), kind="stable")[:count]
    return HotRows(tables[hot], keys[hot])
