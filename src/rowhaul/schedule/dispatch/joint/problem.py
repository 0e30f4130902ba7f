"""What `joint` minimises: a price per row that depends on the set of workers that train it.

Samples on one worker share a pull, so the price of a row is a function of its trainers V:

* one trainer j: ``sole[row, j]``, the pull of the record, and what its owning the row will cost later;
* several: the sum of ``many[row, j]`` over them, the pulls of the values, and the gradients that all of
  them are going to push.

A worker that trained a row must push it sooner or later, whether the next one to need it is another
worker or the cache evicts it. Only one case escapes: the owner is the next to train it, alone. So the
pushes of this iteration are the debts of earlier ones, and the debts made now count now, less the chance
that they are never called in. Gradients owed since earlier are left out: no assignment changes them.

A row that only one sample needs has nothing to share: it is in ``linear``, together with an inclination
of samples towards the workers that trained their rows last, where rows that come together stay together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.masks import NOBODY, ONE, bit, lowest, popcount

Ints = npt.NDArray[np.int64]
Indices = npt.NDArray[np.int32]

UNIT = 16  # all costs are multiplied by it, so that parts of them stay whole numbers


class Problem(NamedTuple):
    """The prices of one batch. Shared rows, those that several samples need, are numbered anew."""

    offsets: Ints  # samples + 1: the shared rows of sample i are rows[offsets[i] : offsets[i + 1]]
    rows: Indices
    linear: Ints  # samples x workers: what does not depend on the other samples
    sole: Ints  # shared rows x workers: the price of the row where one worker trains it
    many: Ints  # shared rows x workers: what a worker adds to it where several do


def problem_of(task: DispatchTask, future: int, num_blanks: int) -> Problem:
    """The prices of a task; what is left to later iterations weighs ``future`` / `UNIT`.

    Blanks, samples without rows, follow the samples: they take the places that no sample needs.
    """
    return Problem(
        *_price(
            np.concatenate([task.offsets, np.repeat(task.offsets[-1:], num_blanks)]),
            task.rows,
            *task.row_locations,
            task.prices,
            task.peer_to_peer,
            future,
        )
    )


@kernel
def _price(
    offsets, rows, latest, owner, partial, free, home, record_size, value_size, prices, peer_to_peer, future
):
    num_samples, num_workers, num_rows = len(offsets) - 1, len(prices), len(latest)
    uses = np.zeros(num_rows, np.int32)
    user = np.zeros(num_rows, np.int32)
    for i in range(num_samples):
        for at in range(offsets[i], offsets[i + 1]):
            uses[rows[at]] += 1
            user[rows[at]] = i
    shared = np.full(num_rows, -1, np.int32)
    num_shared = 0
    for x in range(num_rows):
        if uses[x] > 1 and not free[x]:
            shared[x] = num_shared
            num_shared += 1

    # The lines of single rows are those of their samples, after the shared rows; `many` has no use for them.
    alone = np.zeros((num_shared + num_samples, num_workers), np.int64)
    inclined = np.zeros((num_shared + num_samples, num_workers), np.int64)
    many = np.empty((num_shared + 1, num_workers), np.int64)
    # Of sixteen rows that one worker trains, about five are next trained by it alone again: it neither pushes
    # nor pulls, so ten sixteenths of the debt are never paid. An inclination weighs as much as what remains.
    # Both were found by trying: from half to one and a half times as much the cost hardly changes.
    debt = future * 3 // 8
    for x in range(num_rows):
        if uses[x] == 0 or free[x]:
            continue
        line = np.int64(shared[x]) if shared[x] >= 0 else num_shared + user[x]
        many_line = np.int64(shared[x]) if shared[x] >= 0 else num_shared
        record, value = record_size[x], value_size[x]
        holder, store = np.int64(owner[x]), np.int64(home[x])
        direct = peer_to_peer and holder >= 0
        source = holder if direct else store  # -1 is a store with a link of its own
        source_price = prices[source] if source >= 0 else 0
        store_price = prices[store] if store >= 0 else 0
        for j in range(num_workers):
            pull, later = UNIT * (prices[j] + source_price), prices[j] + store_price
            alone[line, j] += record * (pull + debt * later)
            many[many_line, j] = value * (pull + future * later)

        holders = latest[x] if source < 0 else latest[x] | bit(source)
        while holders != NOBODY:  # they need not pull
            j = lowest(holders)
            holders &= holders - ONE
            alone[line, j] -= record * UNIT * (prices[j] + source_price)
            many[many_line, j] -= value * UNIT * (prices[j] + source_price)
        if store >= 0:  # its own worker need not push
            alone[line, store] -= record * debt * 2 * store_price
            many[many_line, store] -= value * future * 2 * store_price
        if holder >= 0 and not direct and holder != store:  # it pushes now, unless it alone trains again
            alone[line, holder] -= record * UNIT * (prices[holder] + store_price)

        previous = bit(holder) if holder >= 0 else partial[x]
        num_previous = popcount(previous)
        while previous != NOBODY:
            j = lowest(previous)
            previous &= previous - ONE
            if j != store:
                inclined[line, j] -= record * debt * (prices[j] + store_price) // num_previous

    linear = alone[num_shared:] + inclined[num_shared:]
    shared_offsets = np.zeros(num_samples + 1, np.int64)
    shared_rows = np.empty(len(rows), np.int32)
    count = 0
    for i in range(num_samples):
        for at in range(offsets[i], offsets[i + 1]):
            x = shared[rows[at]]
            if x >= 0:
                shared_rows[count] = x
                count += 1
                for j in range(num_workers):
                    linear[i, j] += inclined[x, j]
        shared_offsets[i + 1] = count
    return shared_offsets, shared_rows[:count], linear, alone[:num_shared], many[:num_shared]


@kernel
def weigh(problem, weight):
    """The same problem with the costs of each worker multiplied."""
    return Problem(
        problem.offsets,
        problem.rows,
        problem.linear * weight,
        problem.sole * weight,
        problem.many * weight,
    )
