"""What a step would take on several machines: the very scheduler over a sample, timed by a clock.

Plans depend on the machines' links only through their ratios, so one run of the scheduler is timed on links
of several speeds at once, and without the sum of dense gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rowhaul.advising.costs import Costs
from rowhaul.advising.trace import Trace
from rowhaul.schedule import HotRows, Scheduler, ScheduleSettings, Topology
from rowhaul.schedule.plan import Plan
from rowhaul.simulate.clock import Clock, TimeModel
from rowhaul.simulate.links import Link, Links
from rowhaul.train.cluster_config import ClusterConfig

SPEEDS = tuple(2.0**power for power in range(-4, 9))  # of links, relative to those given
# The part of a step's compute after which half of the gradients are there: of DLRMs, as their sums show.
HALF_SUM_AFTER = 0.75
_WARM_UP = 3  # the first of this many parts of the batches counts in no mean

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Machines:
    """The machines that there are, or could be.

    Args:
        links: of every machine, the ones to take first in front.
        cores: of each machine.
        share_cores: whether all of them share these cores, as on a testbed.
    """

    links: tuple[Link, ...]
    cores: int
    share_cores: bool = False


@dataclass(frozen=True)
class Prediction:
    """A step on some machines.

    Attributes:
        machines: that train.
        dispatcher: who trains which sample; empty for one machine.
        hot_rows: replicated on every machine.
        seconds: of a step.
        compute: of it, on the slowest machine, what a rank does besides reading and planning.
        rows: of it, waiting for rows.
        dense: of it, waiting for the sum of dense gradients.
        planning: of it, waiting for a plan that was not finished in time.
        planning_cpu: processor seconds of reading and planning a batch on each machine, beside training or
            not.
        row_bytes: that all links carry in a step for rows.
        dense_bytes: the same for dense gradients and replicated rows.
        at_speed: seconds of a step on links of other speeds, by `SPEEDS`.
        pruned: whether rows are pruned.
    """

    machines: int
    dispatcher: str
    hot_rows: int
    seconds: float
    compute: float
    rows: float = 0.0
    dense: float = 0.0
    planning: float = 0.0
    planning_cpu: float = 0.0
    row_bytes: float = 0.0
    dense_bytes: float = 0.0
    at_speed: tuple[float, ...] = field(default=(), repr=False)
    pruned: bool = False

    @property
    def name(self) -> str:
        """A short name of how it is done."""
        hot = f", {self.hot_rows:,} hot rows" if self.hot_rows else ""
        return f"{self.dispatcher or 'alone'}{hot}{', pruned' if self.pruned else ''}"


def predict_alone(trace: Trace, costs: Costs) -> Prediction:
    """One machine: no link, no plan."""
    seconds = costs.alone(trace.batch_size)
    return Prediction(1, "", 0, seconds, seconds, at_speed=(seconds,) * len(SPEEDS), pruned=trace.pruned)


def predict(
    trace: Trace,
    config: ClusterConfig,
    count: int,
    dispatcher: str,
    hot: HotRows | None,
    machines: Machines,
    costs: Costs,
    progress: Progress = lambda done: None,
) -> Prediction:
    """Several machines, each of which stores a part of the rows and trains an equal share."""
    topology = Topology(count, 0, colocated=True, peer_to_peer=True)
    links = machines.links[:count]
    settings = trace.layout.schedule_settings(
        replace(config, dispatcher=dispatcher, shares="equal", links="equal"),
        topology,
        hot=hot,
        speeds=[one.bytes_per_second for one in links],
        policies=trace.policies,
    )
    planned = _Planned.run(trace, settings, links, progress)
    share = trace.batch_size / count
    cores = machines.cores / (count if machines.share_cores else 1)
    turns = max(1.0, 1 / cores)  # all ranks compute at the same time
    planning_cpu = planned.cpu * costs.planning + costs.reading * trace.batch_size
    work, planning = costs.rank(share) * turns, planning_cpu * turns
    timed = planned.time(trace, work / share)
    waited = [max(planning - _beside(one, work, cores), 0.0) for one in timed.seconds]
    at_speed = tuple(one + more for one, more in zip(timed.seconds, waited, strict=True))
    now = SPEEDS.index(1.0)
    return Prediction(
        machines=count,
        dispatcher=dispatcher,
        hot_rows=0 if hot is None else len(hot),
        seconds=at_speed[now],
        compute=work,
        rows=max(timed.without_dense - work, 0.0),
        dense=max(timed.seconds[now] - timed.without_dense, 0.0),
        planning=waited[now],
        planning_cpu=planning_cpu,
        row_bytes=timed.row_bytes,
        dense_bytes=timed.dense_bytes,
        at_speed=at_speed,
        pruned=trace.pruned,
    )


def _beside(seconds: float, work: float, cores: float) -> float:
    """The seconds of a step in which a machine can plan without making it longer."""
    if cores >= 2:
        return seconds
    # One core is free while it waits for rows and sums; less than one always has another machine's to do.
    return seconds - work if cores >= 1 else 0.0


def planning_seconds(trace: Trace, config: ClusterConfig) -> float:
    """Processor seconds that planning a step takes on a cluster."""
    topology = config.topology()
    settings = trace.layout.schedule_settings(
        replace(config, links="equal", shares="equal"), topology, policies=trace.policies
    )
    return _Planned.run(trace, settings, (), lambda done: None).cpu


def seconds_at(prediction: Prediction, speed: float) -> float:
    """Seconds of a step on links of ``speed`` times the speed given, between those that were tried."""
    slowness = [1 / one for one in reversed(SPEEDS)]  # bytes take time in proportion to it
    return float(np.interp(1 / speed, slowness, prediction.at_speed[::-1]))


@dataclass(frozen=True)
class _Timed:
    seconds: list[float]  # by `SPEEDS`
    without_dense: float
    row_bytes: float
    dense_bytes: float


@dataclass
class _Planned:
    """The plans of a sample."""

    settings: ScheduleSettings
    links: Sequence[Link]
    plans: list[Plan]
    cpu: float  # processor seconds of a plan

    @classmethod
    def run(
        cls, trace: Trace, settings: ScheduleSettings, links: Sequence[Link], progress: Progress
    ) -> _Planned:
        scheduler = Scheduler(settings, iter(trace.batches))
        plans, taken = [], []
        while True:
            began = time.thread_time()
            if not scheduler.fill():
                break
            plan = scheduler.plan()
            taken.append(time.thread_time() - began)
            plans.append(replace(plan, ids=None, steps=None))  # clocks need moves alone
            progress(len(plans))
        return cls(settings, links, plans, float(np.median(taken[len(taken) // _WARM_UP :])))

    def time(self, trace: Trace, seconds_per_sample: float) -> _Timed:
        clocks = [self._clock(speed, seconds_per_sample, trace.dense_bytes) for speed in SPEEDS]
        clocks.append(self._clock(1.0, seconds_per_sample, 0))
        taken: list[list[float]] = [[] for _ in clocks]
        for plan in self.plans:
            for clock, found in zip(clocks, taken, strict=True):
                previous = clock.observe(plan)
                if previous is not None:
                    found.append(previous)
        skipped = len(self.plans) // _WARM_UP
        means = [float(np.mean(one[skipped:])) for one in taken]
        counted = self.plans[skipped:]
        workers = self.settings.topology.num_workers
        summed = trace.dense_bytes + np.mean([plan.all_reduce_bytes for plan in counted])
        return _Timed(
            means[:-1],
            means[-1],
            float(np.mean([plan.moves.num_bytes.sum() for plan in counted])),
            float(2 * (workers - 1) * summed),
        )

    def _clock(self, speed: float, seconds_per_sample: float, dense_bytes: int) -> Clock:
        links = tuple(Link(one.bytes_per_second * speed, one.latency_seconds) for one in self.links)
        topology = self.settings.topology
        model = TimeModel(
            Links.make(topology, links),
            (seconds_per_sample,) * topology.num_workers,
            dense_bytes,
            half_sum_after=HALF_SUM_AFTER,
        )
        return Clock(model, range(topology.num_workers))
