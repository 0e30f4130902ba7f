"""`round-robin`: sample i to worker i mod n, as long as all have room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.dispatch.task import DispatchTask


@dataclass(frozen=True)
class RoundRobin:
    """Deals samples in rounds, one to each worker; workers that are full are left out of later rounds."""

    name: ClassVar[str] = "round-robin"
    blind: ClassVar[bool] = True

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        """The worker of each sample."""
        room = np.minimum(task.capacities, task.num_samples)
        if room.max(initial=0) - room.min(initial=0) <= 1 and not np.any(np.diff(room) > 0):
            return np.arange(task.num_samples, dtype=np.int32) % np.int32(task.num_workers)
        places = np.repeat(np.arange(task.num_workers, dtype=np.int32), room)
        rounds = np.concatenate([np.arange(places_of_worker) for places_of_worker in room])
        return places[np.argsort(rounds, kind="stable")[: task.num_samples]]
