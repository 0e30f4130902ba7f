"""What an assignment really costs in its iteration: the yardstick of every dispatcher.

Samples on one worker share a pull, and an owner pushes once however many need the row, so the price
of a row is a function of the *set* of workers that train it. Evictions are not in it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.dispatch.cost_kernels import total_cost
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.masks import trainers_of


def true_cost(task: DispatchTask, worker: npt.NDArray[np.int32]) -> int:
    """The cost of all moves before training: owed gradients, owners' pushes, and pulls, each row once.

    Sizes follow the kind of move: a sole trainer needs the whole record, one of several the values.
    """
    return int(
        total_cost(
            trainers_of(task.offsets, task.rows, worker, len(task.latest)),
            *task.row_locations,
            task.prices,
            task.peer_to_peer,
        )
    )
