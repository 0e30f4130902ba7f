"""`brute-force`: the cheapest of all assignments, for tiny batches: the yardstick of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch.kernels import cheapest_assignment
from rowhaul.schedule.dispatch.task import DispatchTask

MOST_ASSIGNMENTS = 1_000_000


@dataclass(frozen=True)
class BruteForce:
    """Minimises the true cost of the iteration (see `true_cost`) by trying everything."""

    name: ClassVar[str] = "brute-force"

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        """The worker of each sample; the first assignment in lexicographic order among the cheapest."""
        num_usable = int(np.count_nonzero(task.capacities))
        if num_usable**task.num_samples > MOST_ASSIGNMENTS:
            raise ConfigError(
                f"brute-force tries all assignments; {task.num_samples} samples on {num_usable} workers have "
                f"{num_usable}**{task.num_samples}, more than {MOST_ASSIGNMENTS:,}; "
                "use a smaller batch, fewer workers or another dispatcher"
            )
        worker: npt.NDArray[np.int32] = cheapest_assignment(
            task.offsets,
            task.rows,
            task.capacities,
            task.latest,
            task.owner,
            task.partial,
            task.free,
            task.home,
            task.record_size,
            task.value_size,
            task.prices,
            task.peer_to_peer,
        )
        return worker
