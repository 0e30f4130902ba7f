"""The compiled transportation solver: exact, on one core, in about the time of a few passes over the costs.

The optimum is a price per column: with the right prices every row simply takes the column where
cost plus price is least, and the columns fill up exactly. Prices are few, so a sample of the rows
finds them nearly; each larger sample starts from the prices of the one before. What then remains is
to move the rows that a column has too many to where there is room (``paths``). Only rows that are
nearly indifferent between two columns can be concerned, so only those are looked at.

Capacity that no row needs is taken by *blanks*, rows that cost nothing anywhere, so that the
columns always fill up exactly.
"""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul.schedule.transportation.paths import FAR, move_excess

# Found by trying sizes from 128 x 8 to 65536 x 64 on random, tied, offset and link-like costs.
SAMPLE_RATIO = 4  # rows of a sample over those of the sample before
SMALLEST_SAMPLE = 2  # rows per column in the first sample
NUM_GAPS_LOOKED_AT = 256  # gaps that stand for all of them when a limit is chosen


@kernel
def solve(cost, capacity, worker, price):
    """Write each row's column in the optimum to ``worker``, and the optimal prices to ``price``.

    Nothing is checked: costs are 0 to ``largest_cost``, capacities are not negative and add up to at
    least the rows (else this never returns), there is a column, and the arrays are C-contiguous int64
    but ``worker``, which is int32. ``price`` holds zeros, or the prices of a similar problem to start from.
    """
    num_rows, num_columns = cost.shape
    size = num_rows
    while size // SAMPLE_RATIO >= SMALLEST_SAMPLE * num_columns:
        size //= SAMPLE_RATIO
    while size < num_rows:
        sample, sample_worker = _sample(cost, size), np.empty(size, np.int32)
        _solve_from_prices(sample, _scaled(capacity, num_rows, size), sample_worker, price)
        larger = num_rows
        while larger // SAMPLE_RATIO > size:
            larger //= SAMPLE_RATIO
        size = larger
    _solve_from_prices(cost, _scaled(capacity, num_rows, num_rows), worker, price)
    lowest = price[0]
    for j in range(num_columns):
        lowest = min(lowest, price[j])
    for j in range(num_columns):
        price[j] -= lowest


@kernel
def _scaled(capacity, num_rows, size):
    """Capacities for a sample of ``size`` of the rows; none that the rows could not use."""
    scaled = np.empty(len(capacity), np.int64)
    total = before = 0
    for j in range(len(capacity)):
        total += min(capacity[j], num_rows)
        scaled[j] = total * size // max(1, num_rows) - before
        before += scaled[j]
    return scaled


@kernel
def _sample(cost, size):
    """One pseudo-random row out of each of ``size`` equal runs of rows."""
    num_rows, num_columns = cost.shape
    sample = np.empty((size, num_columns), np.int64)
    state = np.uint64(size)
    for s in range(size):
        first, end = s * num_rows // size, (s + 1) * num_rows // size
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        i = first + np.int64(state >> np.uint64(33)) % (end - first)
        for j in range(num_columns):
            sample[s, j] = cost[i, j]
    return sample


@kernel
def _solve_from_prices(cost, capacity, worker, price):
    """Solve exactly; the better the prices at the start, the fewer rows have to move."""
    num_rows, num_columns = cost.shape
    gap = np.empty(num_rows, np.int64)  # what it costs a row, price included, to take its second choice
    _take_cheapest(cost, price, worker, gap)
    load = np.zeros(num_columns, np.int64)
    for i in range(num_rows):
        load[worker[i]] += 1
    blanks = _place_blanks(capacity, price, load, num_rows)
    excess = np.int64(0)  # not a literal: `move_excess` would be compiled twice
    for j in range(num_columns):
        excess += max(0, load[j] - capacity[j])

    wanted = 4 * excess + 8 * num_columns
    while excess > 0:
        limit = _limit_for(gap, wanted)
        excess = move_excess(cost, capacity, worker, price, load, blanks, excess, gap, limit)
        if excess > 0:
            _measure_gaps(cost, price, worker, gap)
            wanted *= 4


@kernel
def _take_cheapest(cost, price, worker, gap):
    """Give every row the column where cost plus price is least; which one of equals varies by row.

    The column's number, scrambled by row, is packed below the value, so that the loop needs no branch.
    """
    num_rows, num_columns = cost.shape
    bits = 0
    while 1 << bits < num_columns:
        bits += 1
    mask = (1 << bits) - 1
    for i in range(num_rows):
        scramble = (i * 40503 >> 3) & mask
        best = second = np.int64(np.iinfo(np.int64).max)
        for j in range(num_columns):
            value = (cost[i, j] + price[j]) << bits | (j ^ scramble)
            second = min(second, max(best, value))
            best = min(best, value)
        worker[i] = (best & mask) ^ scramble
        gap[i] = (second >> bits) - (best >> bits)


@kernel
def _measure_gaps(cost, price, worker, gap):
    num_rows, num_columns = cost.shape
    for i in range(num_rows):
        own = worker[i]
        second = FAR
        for j in range(num_columns):
            value = cost[i, j] + price[j]
            second = min(second, FAR if j == own else value)
        gap[i] = second - cost[i, own] - price[own]


@kernel
def _place_blanks(capacity, price, load, num_rows):
    """Put the blanks where the price is lowest, in columns with room first; add them to ``load``."""
    num_columns = len(capacity)
    left, cheapest = -num_rows, 0
    for j in range(num_columns):
        left += capacity[j]
        if price[j] < price[cheapest]:
            cheapest = j
    blanks = np.zeros(num_columns, np.int64)
    for j in range(num_columns):
        if price[j] == price[cheapest]:
            blanks[j] = min(left, max(0, capacity[j] - load[j]))
            left -= blanks[j]
    blanks[cheapest] += left
    for j in range(num_columns):
        load[j] += blanks[j]
    return blanks


@kernel
def _limit_for(gap, wanted):
    """A limit that about ``wanted`` of the gaps are below, judged by some of them."""
    num_rows = len(gap)
    if num_rows <= max(wanted, NUM_GAPS_LOOKED_AT):
        return FAR
    some = np.empty(NUM_GAPS_LOOKED_AT, np.int64)
    highest = np.int64(0)
    for s in range(NUM_GAPS_LOOKED_AT):
        some[s] = gap[s * num_rows // NUM_GAPS_LOOKED_AT]
        highest = max(highest, some[s])
    enough = wanted * NUM_GAPS_LOOKED_AT // num_rows + 1
    low, high = np.int64(0), highest + 1
    while low < high:
        limit = (low + high) // 2
        below = 0
        for s in range(NUM_GAPS_LOOKED_AT):
            below += some[s] < limit
        if below < enough:
            low = limit + 1
        else:
            high = limit
    return low
