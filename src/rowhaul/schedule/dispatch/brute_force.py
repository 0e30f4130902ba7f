"""`brute-force`: the cheapest of all assignments, for tiny batches: the yardstick of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch.costs import sizes_moved
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.masks import trainers_of

MOST_ASSIGNMENTS = 1_000_000


@dataclass(frozen=True)
class BruteForce:
    """Minimises the true cost of the iteration (see `true_cost`) by trying everything."""

    name: ClassVar[str] = "brute-force"

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        """The worker of each sample; the first assignment in lexicographic order among the cheapest."""
        if num_assignments(task.num_samples, task.capacities.tolist(), MOST_ASSIGNMENTS) > MOST_ASSIGNMENTS:
            raise ConfigError(
                f"brute-force tries all assignments; {task.num_samples} samples on {task.num_workers} "
                f"workers have more than {MOST_ASSIGNMENTS:,}; "
                "use a smaller batch, fewer workers or another dispatcher"
            )
        worker: npt.NDArray[np.int32] = cheapest_assignment(
            task.offsets, task.rows, task.capacities, task.row_locations, task.prices, task.peer_to_peer
        )
        return worker


def num_assignments(num_samples: int, capacities: list[int], limit: int) -> int:
    """The number of ways to give samples to workers of these capacities; inexact beyond the limit.

    >>> num_assignments(3, [1, 1, 1], 100), num_assignments(3, [3, 3], 100)
    (6, 8)
    """
    ways = [1] + [0] * num_samples  # by number of samples: ways to place as many on the workers so far
    for capacity in capacities:
        for placed in range(num_samples, 0, -1):
            total, choices = 0, 1  # choices: which of the samples placed so far are on this worker
            for here in range(min(capacity, placed) + 1):
                total += ways[placed - here] * choices
                if total > limit:
                    break
                choices = choices * (placed - here) // (here + 1)
            ways[placed] = total
    return ways[num_samples]


@kernel
def cheapest_assignment(offsets, rows, capacities, row_locations, prices, peer_to_peer):
    """The cheapest of all assignments, the first in lexicographic order among equals."""
    num_samples, num_workers = len(offsets) - 1, len(capacities)
    room = capacities.copy()
    worker = np.full(num_samples, -1, np.int32)
    best = worker.copy()
    least = np.int64(-1)
    i = 0
    while i >= 0:  # sample i is the next to move on to another worker
        if i == num_samples:
            trainers = trainers_of(offsets, rows, worker, len(row_locations[0]))
            sent, received = sizes_moved(trainers, *row_locations, peer_to_peer, num_workers)
            cost = ((sent + received) * prices).sum()
            if least < 0 or cost < least:
                least, best = cost, worker.copy()
            i -= 1
            continue
        if worker[i] >= 0:
            room[worker[i]] += 1
        worker[i] += 1
        while worker[i] < num_workers and room[worker[i]] == 0:
            worker[i] += 1
        if worker[i] == num_workers:
            worker[i] = -1
            i -= 1
        else:
            room[worker[i]] -= 1
            i += 1
    return best
