"""What an assignment costs: expected, sample by sample; and really, with shared moves counted once.

Samples on one worker share a pull, and an owner pushes once however many need the row, so the true price of a
row is a function of the *set* of workers that train it. Evictions are not in it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.masks import NOBODY, ONE, bit, lowest, trainers_of

Ints = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int32]


def row_costs(task: DispatchTask) -> Ints:
    """Rows x workers: the cost of bringing a row's latest record to one worker.

    Nothing if the worker holds it; else the pull, and the push of the worker that owns it. Owed gradients of
    split rows are pushed in any case, so they do not count.
    """
    costs: Ints = price_rows(
        task.latest, task.owner, task.free, task.home, task.record_size, task.prices, task.peer_to_peer
    )
    return costs


def expected_cost(task: DispatchTask) -> Ints:
    """Samples x workers: the costs of a sample's rows, as if no other sample were trained (ESD, 1)."""
    costs: Ints = sum_by_sample(task.offsets, task.rows, row_costs(task))
    return costs


def true_cost(task: DispatchTask, worker: Indices) -> int:
    """The cost of all moves before training: owed gradients, owners' pushes, and pulls, each row once.

    Sizes follow the kind of move: a sole trainer needs the whole record, one of several the values.
    """
    sent, received = link_costs(task, worker)
    return int(sent.sum() + received.sum())


def link_costs(task: DispatchTask, worker: Indices) -> tuple[Ints, Ints]:
    """The same by worker: the cost of what each sends, and of what it receives."""
    trainers = trainers_of(task.offsets, task.rows, worker, len(task.latest))
    sent, received = sizes_moved(trainers, *task.row_locations, task.peer_to_peer, len(task.prices))
    return sent * task.prices, received * task.prices


@kernel
def price_rows(latest, owner, free, home, record_size, prices, peer_to_peer):
    """Rows x workers: the cost of bringing the latest record of a row to one worker."""
    num_rows, num_workers = len(latest), len(prices)
    costs = np.empty((num_rows, num_workers), np.int64)
    for x in range(num_rows):
        size = record_size[x] * (free[x] == 0)
        holder, store = owner[x], home[x]
        push = size * prices[max(holder, 0)] * (holder >= 0)
        pull = np.int64(0)
        through_store = store >= 0 and not (peer_to_peer and holder >= 0)
        if through_store:
            pull = size * prices[store]
            push = np.int64(0) if holder == store else push + pull * (holder >= 0)
        # A mask instead of a branch: this is the loop that vectorises.
        holders = np.int64(latest[x])
        for j in range(num_workers):
            costs[x, j] = (push + pull + size * prices[j]) & (((holders >> j) & 1) - 1)
        if through_store:
            costs[x, store] = push
    return costs


@kernel
def sum_by_sample(offsets, rows, row_costs):
    """Samples x workers: the summed costs of each sample's rows."""
    num_samples, num_workers = len(offsets) - 1, row_costs.shape[1]
    sums = np.zeros((num_samples, num_workers), np.int64)
    for i in range(num_samples):
        for at in range(offsets[i], offsets[i + 1]):
            x = rows[at]
            for j in range(num_workers):
                sums[i, j] += row_costs[x, j]
    return sums


@kernel
def sizes_moved(
    trainers, latest, owner, partial, free, home, record_size, value_size, peer_to_peer, num_workers
):
    """Sizes that each worker sends and receives before training, both ends of a move counted."""
    # One place more: it stands for dedicated stores, whose number is -1.
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
