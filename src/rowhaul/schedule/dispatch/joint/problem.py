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

Rows whose price no assignment changes are left out: those that move nothing, and those that so many samples
need that every worker will train them anyway. In a large batch they are most of the ids.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.masks import NOBODY, ONE, bit, lowest, popcount
from rowhaul.schedule.threads import bounds, take

Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]

UNIT = 16  # all costs are multiplied by it, so that parts of them stay whole numbers
LANES = 8  # costs of workers come in groups of so many: compilers turn those into vector instructions
LARGEST = 2**28  # what the rows of a sample may cost in all, far from overflow of 32 bits
NEVER = 2**30  # the cost of a worker that there is not
# Samples of each worker that need a row, were they dealt evenly, from which on all workers train it anyway.
EVERYWHERE = 16

LEFT_OUT, SINGLE = -1, -2
CHUNK_SAMPLES = 1024  # that a thread takes at a time


class Problem(NamedTuple):
    """The prices of one batch. Shared rows, those that several samples need, are numbered anew.

    Costs have a column per worker, and as many more as make their number a multiple of `LANES`.
    """

    offsets: Longs  # samples + 1: the shared rows of sample i are rows[offsets[i] : offsets[i + 1]]
    rows: Ints
    linear: Ints  # samples x columns: what does not depend on the other samples
    sole: Ints  # shared rows x columns: the price of the row where one worker trains it
    many: Ints  # shared rows x columns: what a worker adds to it where several do
    uses: Ints  # shared rows: samples that need each
    starts: Longs  # shared rows + 1: the samples that need row x are samples[starts[x] : starts[x + 1]]
    samples: Ints  # in order, row by row


def problem_of(task: DispatchTask, future: int, num_blanks: int) -> Problem:
    """The prices of a task; what is left to later iterations weighs ``future`` / `UNIT`.

    Blanks, samples without rows, follow the samples: they take the places that no sample needs.
    """
    most = np.diff(task.offsets).max(initial=0) * task.record_size.max(initial=0) * task.prices.max(initial=0)
    shift = max(0, int(8 * UNIT * most // LARGEST).bit_length())
    width = (task.num_workers + LANES - 1) // LANES * LANES
    offsets = np.concatenate([task.offsets, np.repeat(task.offsets[-1:], num_blanks)])
    shared, uses = _shared_rows(offsets, task.rows, task.free, task.capacities)
    sole, many = (np.empty((len(uses), width), np.int32) for _ in range(2))
    linear = np.empty((len(offsets) - 1, width), np.int32)
    # Every chunk writes to places of its own: the shared rows of a sample where all of its rows are.
    found, num_found = np.empty(len(task.rows), np.int32), np.empty(len(offsets) - 1, np.int64)
    row_edges, sample_edges = bounds(len(shared)), bounds(len(linear), CHUNK_SAMPLES)
    task.threads.share(
        lambda counter: _price(
            counter, row_edges, sample_edges, offsets, task.rows, shared, *task.row_locations, task.prices,
            task.peer_to_peer, future, shift, sole, many, linear, found, num_found,
        ),
        len(row_edges) + len(sample_edges) - 2,
    )  # fmt: skip
    kept_offsets, kept, starts, samples = _arrange(offsets, found, num_found, uses)
    return Problem(kept_offsets, kept, linear, sole, many, uses, starts, samples)


@kernel
def _price(
    counter, row_edges, sample_edges, offsets, rows, shared, latest, owner, partial, free, home, record_size,
    value_size, prices, peer_to_peer, future, shift, sole, many, linear, found, num_found,
):  # fmt: skip
    # Of sixteen rows that one worker trains, about five are next trained by it alone again: it neither pushes
    # nor pulls, so ten sixteenths of the debt are never paid. An inclination weighs as much as what remains.
    # Both were found by trying: from half to one and a half times as much the cost hardly changes.
    debt = future * 3 // 8
    num_row_chunks, num_chunks = len(row_edges) - 1, len(row_edges) + len(sample_edges) - 2
    chunk = take(counter)
    while chunk < num_chunks:
        if chunk < num_row_chunks:
            for x in range(row_edges[chunk], row_edges[chunk + 1]):
                s = shared[x]
                if s >= 0:
                    _price_shared(
                        latest[x], np.int64(owner[x]), np.int64(home[x]), record_size[x], value_size[x],
                        prices, peer_to_peer, future, debt, shift, sole[s], many[s],
                    )  # fmt: skip
        else:
            part = chunk - num_row_chunks
            _price_samples(
                sample_edges[part], sample_edges[part + 1], offsets, rows, shared, latest, owner, partial,
                home, record_size, prices, peer_to_peer, debt, shift, linear, found, num_found,
            )  # fmt: skip
        chunk = take(counter)


@kernel
def _price_samples(
    first, end, offsets, rows, shared, latest, owner, partial, home, record_size, prices, peer_to_peer, debt,
    shift, linear, found, num_found,
):  # fmt: skip
    """What depends on one sample alone, and which of its rows are shared."""
    num_workers, width = len(prices), linear.shape[1]
    own = np.zeros(num_workers, np.int64)  # of the sample at hand, less a base that depends on prices alone
    for i in range(first, end):
        base = by_price = np.int64(0)
        count = offsets[i]
        for at in range(offsets[i], offsets[i + 1]):
            x = rows[at]
            s = shared[x]
            if s == LEFT_OUT:
                continue
            record, holder, store = record_size[x], np.int64(owner[x]), np.int64(home[x])
            store_price = prices[store] if store >= 0 else np.int64(0)
            if s >= 0:
                found[count] = s
                count += 1
            else:
                direct = peer_to_peer and holder >= 0
                source = holder if direct else store
                source_price = prices[source] if source >= 0 else np.int64(0)
                by_price += record * (UNIT + debt)
                base += record * (UNIT * source_price + debt * store_price)
                holders = latest[x] if source < 0 else latest[x] | bit(source)
                while holders != NOBODY:
                    j = lowest(holders)
                    holders &= holders - ONE
                    own[j] -= record * UNIT * (prices[j] + source_price)
                if store >= 0:
                    own[store] -= record * debt * 2 * store_price
                if holder >= 0 and not direct and holder != store:
                    own[holder] -= record * UNIT * (prices[holder] + store_price)
            previous = bit(holder) if holder >= 0 else partial[x]
            if previous != NOBODY:
                num_previous = popcount(previous)
                while previous != NOBODY:
                    j = lowest(previous)
                    previous &= previous - ONE
                    if j != store:
                        own[j] -= record * debt * (prices[j] + store_price) // num_previous
        num_found[i] = count - offsets[i]
        line = linear[i]
        for j in range(num_workers):
            line[j] = (by_price * prices[j] + base + own[j]) >> shift
            own[j] = 0
        for j in range(num_workers, width):
            line[j] = NEVER


@kernel
def _arrange(offsets, found, num_found, uses):
    """Put the shared rows of all samples one behind the other, and list the samples of each row."""
    num_samples, num_rows = len(num_found), len(uses)
    starts = np.zeros(num_rows + 2, np.int64)
    for x in range(num_rows):
        starts[x + 2] = starts[x + 1] + uses[x]
    kept_offsets = np.zeros(num_samples + 1, np.int64)
    num_ids, count = starts[num_rows + 1], 0
    kept, samples = np.empty(num_ids, np.int32), np.empty(num_ids, np.int32)
    for i in range(num_samples):
        for at in range(offsets[i], offsets[i] + num_found[i]):
            x = found[at]
            samples[starts[x + 1]] = i
            starts[x + 1] += 1
            kept[count] = x
            count += 1
        kept_offsets[i + 1] = count
    return kept_offsets, kept, starts[: num_rows + 1], samples


@kernel
def _shared_rows(offsets, rows, free, capacities):
    """The numbers of shared rows, or what else they are; and how many samples need each."""
    num_rows = len(free)
    uses = np.zeros(num_rows, np.int32)
    for at in range(len(rows)):
        uses[rows[at]] += 1
    places, fewest = np.int64(0), np.int64(len(rows) + 1)
    for capacity in capacities:
        places += capacity
        if capacity > 0:
            fewest = min(fewest, capacity)
    shared = np.empty(num_rows, np.int32)
    num_shared = 0
    for x in range(num_rows):
        if free[x] or uses[x] == 0 or uses[x] * fewest >= EVERYWHERE * places:
            shared[x] = LEFT_OUT
        elif uses[x] == 1:
            shared[x] = SINGLE
        else:
            shared[x] = num_shared
            uses[num_shared] = uses[x]
            num_shared += 1
    return shared, uses[:num_shared].copy()


@kernel
def _price_shared(
    latest, holder, store, record, value, prices, peer_to_peer, future, debt, shift, sole, many
):
    num_workers = len(prices)
    direct = peer_to_peer and holder >= 0
    source = holder if direct else store  # -1 is a store with a link of its own
    source_price = prices[source] if source >= 0 else np.int64(0)
    store_price = prices[store] if store >= 0 else np.int64(0)
    for j in range(num_workers):
        pull, later = UNIT * (prices[j] + source_price), prices[j] + store_price
        sole[j] = (record * (pull + debt * later)) >> shift
        many[j] = (value * (pull + future * later)) >> shift
    for j in range(num_workers, len(sole)):
        sole[j] = many[j] = 0

    special = latest
    for j in (source, store, holder):
        if j >= 0:
            special |= bit(j)
    while special != NOBODY:
        j = lowest(special)
        special &= special - ONE
        # Holders need not pull; the store's own worker need not push.
        has_it = j == source or latest & bit(j) != NOBODY
        pull = np.int64(0) if has_it else UNIT * (prices[j] + source_price)
        later = np.int64(0) if j == store else prices[j] + store_price
        alone = record * (pull + debt * later)
        if j == holder and not direct and holder != store:  # it pushes now, unless it alone trains again
            alone -= record * UNIT * (prices[j] + store_price)
        sole[j] = alone >> shift
        many[j] = (value * (pull + future * later)) >> shift


@kernel
def weigh(problem, weight, even):
    """The same problem with the costs of each worker multiplied by its weight / ``even``."""
    return Problem(
        problem.offsets,
        problem.rows,
        _weighed(problem.linear, weight, even),
        _weighed(problem.sole, weight, even),
        _weighed(problem.many, weight, even),
        problem.uses,
        problem.starts,
        problem.samples,
    )


@kernel
def _weighed(costs, weight, even):
    weighed = costs.copy()
    for line in range(len(costs)):
        for j in range(len(weight)):
            weighed[line, j] = costs[line, j] * weight[j] // even
    return weighed
