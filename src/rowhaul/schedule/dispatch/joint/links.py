"""What an assignment moves over each worker's link before training, both ends of a move counted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.schedule.dispatch.joint.problem import Indices, Ints
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.masks import NOBODY, ONE, bit, lowest, trainers_of

Masks = npt.NDArray[np.uint64]
Workers = npt.NDArray[np.int16]


def link_costs(task: DispatchTask, worker: Indices) -> tuple[Ints, Ints]:
    """The cost of what each worker sends, and of what it receives."""
    sent, received = _link_costs(
        trainers_of(task.offsets, task.rows, worker, len(task.latest)),
        *task.row_locations,
        task.peer_to_peer,
        len(task.prices),
    )
    return sent * task.prices, received * task.prices


@kernel
def _link_costs(
    trainers: Masks,
    latest: Masks,
    owner: Workers,
    partial: Masks,
    free: npt.NDArray[np.uint8],
    home: Workers,
    record_size: Ints,
    value_size: Ints,
    peer_to_peer: bool,
    num_workers: int,
) -> tuple[Ints, Ints]:
    """Sizes sent and received. The last place stands for stores apart, whose number is -1."""
    sent = np.zeros(num_workers + 1, np.int64)
    received = np.zeros(num_workers + 1, np.int64)
    for x in range(len(trainers)):
        if trainers[x] == NOBODY or free[x]:
            continue
        direct = peer_to_peer and owner[x] >= 0
        source = owner[x] if direct else home[x]
        alone = trainers[x] & (trainers[x] - ONE) == NOBODY
        owner_trains = owner[x] >= 0 and trainers[x] & bit(owner[x]) != NOBODY
        debtors = partial[x]
        while debtors != NOBODY:
            j = lowest(debtors)
            debtors &= debtors - ONE
            if j != source:
                sent[j] += value_size[x]
                received[source] += value_size[x]
        if owner[x] >= 0 and owner[x] != source and not (alone and owner_trains):
            sent[owner[x]] += record_size[x]
            received[source] += record_size[x]
        takers = trainers[x] & ~latest[x]
        # Several trainers, the owner not among them: the first gets the whole record.
        size = record_size[x] if alone or (direct and not owner_trains) else value_size[x]
        while takers != NOBODY:
            j = lowest(takers)
            takers &= takers - ONE
            if j != source:
                sent[source] += size
                received[j] += size
                size = record_size[x] if alone else value_size[x]
    return sent[:num_workers], received[:num_workers]
