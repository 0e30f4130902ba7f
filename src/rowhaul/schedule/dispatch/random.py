"""`random`: a balanced random partition, the baseline that plain data-parallel training is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.dispatch.cost_kernels import shuffle
from rowhaul.schedule.dispatch.task import DispatchTask


@dataclass(frozen=True)
class Random:
    """Deals all places that the workers have in random order."""

    name: ClassVar[str] = "random"
    blind: ClassVar[bool] = True

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        """The worker of each sample."""
        room = np.minimum(task.capacities, task.num_samples)
        places = np.repeat(np.arange(task.num_workers, dtype=np.int32), room)
        shuffle(places, task.seed)
        return places[: task.num_samples]
