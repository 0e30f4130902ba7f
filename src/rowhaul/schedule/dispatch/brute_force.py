"""`brute-force`: the cheapest of all assignments, for tiny batches: the yardstick of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch.cost_kernels import cheapest_assignment
from rowhaul.schedule.dispatch.task import DispatchTask

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
            task.offsets,
            task.rows,
            task.capacities,
            *task.row_locations,
            task.prices,
            task.peer_to_peer,
        )
        return worker


def num_assignments(num_samples: int, capacities: list[int], limit: int) -> int:
    """In how many ways samples can be given to workers with so much room; beyond the limit, some number too.

    >>> num_assignments(3, [1, 1, 1], 100), num_assignments(3, [3, 3], 100)
    (6, 8)
    """
    ways = [1] + [0] * num_samples  # of placing so many samples on the workers so far
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
