"""`esd`: samples to the workers where they are expected to cost least (ESD, algorithms 1 and 2).

The samples with most to lose are placed optimally, the others greedily. The optimum is a
transportation problem, not the far larger assignment problem of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch.costs import expected_cost
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.transportation import largest_cost, transport

Criterion = Literal["min2-min", "min3-min", "min3-min2", "mean"]


@dataclass(frozen=True)
class Esd:
    """Places the share ``alpha`` of the samples optimally and the rest greedily, most to lose first.

    What a sample has to lose is its ``criterion``: a difference between its smallest costs, or the mean
    of all. Samples with equal criteria keep their order in the batch.
    """

    alpha: Fraction = Fraction(1)
    criterion: Criterion = "min2-min"
    name: ClassVar[str] = "esd"

    def __post_init__(self) -> None:
        try:  # a float means the decimal number it prints as: floor(10 * 0.3) is 3
            alpha = Fraction(str(self.alpha))
        except (ValueError, ZeroDivisionError):
            alpha = Fraction(-1)
        if not 0 <= alpha <= 1:
            given = float(self.alpha) if isinstance(self.alpha, Fraction) else self.alpha
            raise ConfigError(f"alpha is the share of samples placed optimally, from 0 to 1; got {given}")
        object.__setattr__(self, "alpha", alpha)
        if self.criterion not in get_args(Criterion):
            raise ConfigError(
                f"unknown criterion {self.criterion!r}; known are {', '.join(get_args(Criterion))}"
            )

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        """The worker of each sample."""
        cost = _solvable(expected_cost(task))
        numerator, denominator = self.alpha.as_integer_ratio()  # exact, however long the decimals
        optimal_room = np.array([m * numerator // denominator for m in task.capacities.tolist()], np.int64)
        num_optimal = min(int(optimal_room.sum()), task.num_samples)
        if num_optimal == task.num_samples:
            return transport(cost, optimal_room)
        order = np.argsort(-_criterion(self.criterion, cost[:, task.capacities > 0]), kind="stable")
        optimal, greedy = order[:num_optimal], order[num_optimal:]
        worker = np.empty(task.num_samples, np.int32)
        worker[optimal] = transport(cost[optimal], optimal_room)
        allocate_cheapest(cost, greedy, task.capacities - optimal_room, worker)
        return worker


def _solvable(cost: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The costs, without so many of their last bits that the solver can take the largest one."""
    excess = int(cost.max(initial=0)) // (largest_cost(cost.shape[1]) + 1)
    return cost >> excess.bit_length()


def _criterion(criterion: Criterion, cost: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """What each sample has to lose. Where there is no second or third worker, the last stands in for it."""
    if criterion == "mean":
        to_lose: npt.NDArray[np.int64] = cost.sum(axis=1)
    else:
        smaller, larger = {"min2-min": (0, 1), "min3-min": (0, 2), "min3-min2": (1, 2)}[criterion]
        last = cost.shape[1] - 1
        to_lose = regrets(cost, min(smaller, last), min(larger, last))
    return to_lose


@kernel
def regrets(costs, smaller, larger):
    """For each row of costs, its ``larger``-th smallest value less its ``smaller``-th, counted from 0."""
    num_samples, num_workers = costs.shape
    differences = np.empty(num_samples, np.int64)
    least = np.empty(larger + 1, np.int64)
    for i in range(num_samples):
        least[:] = np.iinfo(np.int64).max
        for j in range(num_workers):
            value = costs[i, j]
            for place in range(larger + 1):
                if value < least[place]:
                    value, least[place] = least[place], value
        differences[i] = least[larger] - least[smaller]
    return differences


@kernel
def allocate_cheapest(costs, order, room, worker):
    """Give samples, in order, to their cheapest worker with room; ``room`` is used up."""
    for i in order:
        best = -1
        for j in range(len(room)):
            if room[j] > 0 and (best < 0 or costs[i, j] < costs[i, best]):
                best = j
        worker[i] = best
        room[best] -= 1
