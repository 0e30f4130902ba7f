"""`joint`: all samples of a batch placed together, at what their rows cost now and later.

A dispatcher beyond the papers, in steps of a millisecond or less: `problem` prices rows by the set of workers
that train them; `growth` makes a first assignment; `search` improves it, keeping the rows' state in `spread`.
Small batches, where luck decides more, are also searched from the assignment of `esd:1`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch.costs import expected_cost, link_costs
from rowhaul.schedule.dispatch.joint.growth import grow
from rowhaul.schedule.dispatch.joint.problem import UNIT, Ints, Longs, Problem, problem_of, weigh
from rowhaul.schedule.dispatch.joint.search import improve
from rowhaul.schedule.dispatch.joint.spread import cost_of, make_spread
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.transportation import largest_cost, transport

Objective = Literal["sum", "makespan"]
Auto = Literal["auto"]

PASSES = 4  # by default, and where ``auto`` starts; twice as many gain less than a hundredth
MOST_PASSES = 8  # of ``auto``

SMALL_BATCH = 256  # samples up to which a second start takes little time
WEIGHINGS = 4  # times that the links' weights are changed for the makespan
EVEN_WEIGHT = 64
COST_BITS = 55  # of costs by which weights change: times a weight, or added up over workers, they fit 64


@dataclass(frozen=True)
class Joint:
    """Minimises what the rows of a batch cost, now and later, shared moves counted once (see `problem`).

    Args:
        passes: the budget of the search: how often it looks at every sample, in the mean, to move it. Samples
            that are nearest to moving come first. With ``auto`` control records set it, so that a
            decision fits into the time there is; see `rowhaul.tuning.joint_passes`.
        future: the weight of what the assignment will cost later: pushes of what is trained now, less the
            hits that it allows. 0 minimises the moves of this iteration alone.
        objective: the ``sum`` over all links, or the ``makespan``: from the least sum on, shift moves away
            from the slowest link as long as the iteration gets shorter (slowest send + slowest receive).
    """

    passes: int | Auto = PASSES
    future: float = 1.0
    objective: Objective = "sum"
    name: ClassVar[str] = "joint"

    def __post_init__(self) -> None:
        if isinstance(self.passes, int) and self.passes < 0:
            raise ConfigError(f"passes must not be negative; got {self.passes}")
        if not isinstance(self.passes, int) and self.passes != "auto":
            raise ConfigError(f"passes is a whole number or auto; got {self.passes!r}")
        if not 0 <= self.future <= 1:
            raise ConfigError(f"future is a weight from 0 to 1; got {self.future}")
        if self.objective not in get_args(Objective):
            raise ConfigError(
                f"unknown objective {self.objective!r}; known are {', '.join(get_args(Objective))}"
            )

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        """The worker of each sample."""
        capacities = np.minimum(task.capacities, task.num_samples)
        num_blanks = int(capacities.sum()) - task.num_samples
        problem = problem_of(task, round(self.future * UNIT), num_blanks)
        worker = self._least_sum(problem, task, capacities)
        if self.objective == "makespan":
            worker = _shorter(problem, task, capacities, worker)
        return worker[: task.num_samples]

    def _least_sum(self, problem: Problem, task: DispatchTask, capacities: Longs) -> Ints:
        starts: list[Ints] = [grow(problem, task.prices, capacities)]
        second = _cheapest_alone(task, capacities) if task.num_samples <= SMALL_BATCH else None
        if second is not None:
            starts.append(second)
        passes = self.passes if isinstance(self.passes, int) else PASSES
        found = []
        for start in starts:
            spread, worker = make_spread(problem, start, task.threads), start.copy()
            before = cost_of(problem, spread, start)
            improve(problem, spread, worker, capacities, passes, task.threads)
            after = cost_of(problem, spread, worker)
            found.append((after, worker) if after < before else (before, start))
        return min(found, key=lambda one: one[0])[1]


def _cheapest_alone(task: DispatchTask, capacities: Longs) -> Ints | None:
    """What `esd:1` would do, blanks included; None where costs are too large to solve that."""
    cost = expected_cost(task)
    if cost.max(initial=0) > largest_cost(task.num_workers):
        return None
    worker = transport(cost, capacities)
    room = capacities - np.bincount(worker, minlength=task.num_workers)
    return np.concatenate([worker, np.repeat(np.arange(task.num_workers, dtype=np.int32), room)])


def _shorter(problem: Problem, task: DispatchTask, capacities: Longs, worker: Ints) -> Ints:
    """Raise the weights of slow links step by step; returns the assignment with the least makespan."""
    best, least = worker, None
    weight = np.full(task.num_workers, EVEN_WEIGHT, np.int64)
    for weighing in range(WEIGHINGS + 1):
        sent, received = link_costs(task, worker[: task.num_samples])
        makespan = int(sent.max() + received.max())
        if least is None or makespan < least:
            best, least = worker, makespan
        if weighing < WEIGHINGS:
            costs = sent + received
            costs >>= max(0, int(costs.max()).bit_length() - COST_BITS)
            mean, most = int(costs.sum()) // len(costs), max(1, int(costs.max()))
            weight += weight * (costs - mean) // (4 * most)
            weight = weight.clip(EVEN_WEIGHT // 2, EVEN_WEIGHT * 2)
            weighted, worker = weigh(problem, weight, EVEN_WEIGHT), worker.copy()
            spread = make_spread(weighted, worker, task.threads)
            improve(weighted, spread, worker, capacities, 1, task.threads)
    return best
