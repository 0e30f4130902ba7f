"""`random`: a balanced random partition, the baseline that plain data-parallel training is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.topology import row_hash


@dataclass(frozen=True)
class Random:
    """Deals all places of the workers in random order."""

    name: ClassVar[str] = "random"
    blind: ClassVar[bool] = True

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        """The worker of each sample."""
        room = np.minimum(task.capacities, task.num_samples)
        places = np.repeat(np.arange(task.num_workers, dtype=np.int32), room)
        shuffle(places, task.seed)
        return places[: task.num_samples]


@kernel
def shuffle(values, seed):
    """Put values into a random order, in place; the same everywhere for the same seed."""
    for last in range(len(values) - 1, 0, -1):
        other = np.int64(row_hash(seed, last) % np.uint64(last + 1))
        values[last], values[other] = values[other], values[last]
