"""Moving rows out of columns that have too many: successive shortest paths in the graph of columns.

An edge from one column to another costs what the cheapest move of a row between them adds, prices
included. Prices rise just enough to make the shortest path free; then every row that is indifferent
along it moves at once, since integer costs have many ties.
"""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel

FAR = 2**61  # more than any path costs, and far from overflow
NUM_TRIED_FOR_TIES = 64  # candidates looked at before all of them are measured anew


@kernel
def move_excess(cost, capacity, worker, price, load, blanks, excess, gap, limit):
    """Move rows until no column has too many, or until rows with a gap of ``limit`` would have to move.

    Only the rows with a smaller gap, the candidates, are looked at: the others stay content with
    their column while no price has risen by more than the limit. ``load`` counts the rows and blanks
    of each column, ``excess`` what they are over capacity together. Returns what is left of it.
    """
    num_columns = len(price)
    candidates, count = _candidates_by_column(worker, gap, limit, num_columns)
    reach = np.empty((num_columns, num_columns), np.int64)
    for j in range(num_columns):
        _measure_reach(cost, candidates, count, j, reach)
    distance, previous = np.empty(num_columns, np.int64), np.empty(num_columns, np.int64)
    marks = np.empty(num_columns, np.bool_)
    risen = np.zeros(num_columns, np.int64)
    while excess > 0:
        target = _nearest_room(capacity, load, blanks, price, count, reach, distance, previous, marks)
        if target < 0:
            break
        for j in range(num_columns):
            if risen[j] + distance[target] - distance[j] > limit:
                return excess
        for j in range(num_columns):
            rise = max(0, distance[target] - distance[j])
            price[j] += rise
            risen[j] += rise

        amount = capacity[target] - load[target]
        end = target
        while previous[end] >= 0:
            start = previous[end]
            difference = price[start] - price[end]
            spare = blanks[start] if difference == 0 else 0
            if spare < amount:
                found = _count_indifferent(cost, candidates, count, start, end, difference, amount - spare)
                amount = spare + found
            end = start
        amount = min(amount, load[end] - capacity[end])
        load[end] -= amount
        load[target] += amount
        excess -= amount

        end = target  # from the end of the path, so that no row moves twice
        while previous[end] >= 0:
            start = previous[end]
            difference = price[start] - price[end]
            spare = min(amount, blanks[start]) if difference == 0 else 0
            blanks[start] -= spare
            blanks[end] += spare
            if spare < amount:
                _move_rows(
                    cost, worker, candidates, count, reach, start, end, difference, amount - spare, marks
                )
            end = start
    return excess


@kernel
def _candidates_by_column(worker, gap, limit, num_columns):
    """The rows with a gap below the limit: those of column j are candidates[j, : count[j]]."""
    num_candidates = 0
    for i in range(len(gap)):
        num_candidates += gap[i] < limit
    candidates = np.empty((num_columns, num_candidates), np.int32)  # any of them may end up in any column
    count = np.zeros(num_columns, np.int64)
    for i in range(len(gap)):
        if gap[i] < limit:
            j = worker[i]
            candidates[j, count[j]] = i
            count[j] += 1
    return candidates, count


@kernel
def _measure_reach(cost, candidates, count, start, reach):
    """Set reach[start, j] to the least that the cost of a candidate grows when it moves from start to j."""
    num_columns = cost.shape[1]
    for j in range(num_columns):
        reach[start, j] = FAR
    for c in range(count[start]):
        i = candidates[start, c]
        own = cost[i, start]
        for j in range(num_columns):
            reach[start, j] = min(reach[start, j], cost[i, j] - own)


@kernel
def _nearest_room(capacity, load, blanks, price, count, reach, distance, previous, visited):
    """Find the shortest path from the columns with too many rows to one with room (Dijkstra); -1 if none.

    Leaves the length of the way to each column in ``distance`` and the column before it in ``previous``.
    """
    num_columns = len(price)
    for j in range(num_columns):
        distance[j] = 0 if load[j] > capacity[j] else FAR
        previous[j] = -1
        visited[j] = False
    while True:
        nearest, least = -1, FAR
        for j in range(num_columns):
            if not visited[j] and distance[j] < least:
                nearest, least = j, distance[j]
        if nearest < 0 or load[nearest] < capacity[nearest]:
            return nearest
        visited[nearest] = True
        if count[nearest] == 0 and blanks[nearest] == 0:
            continue
        longest_step = 0 if blanks[nearest] > 0 else FAR
        base = least - price[nearest]
        for j in range(num_columns):
            length = base + min(reach[nearest, j], longest_step) + price[j]
            if length < distance[j]:
                distance[j] = length
                previous[j] = nearest


@kernel
def _count_indifferent(cost, candidates, count, start, end, difference, enough):
    """How many rows of one column would as soon be in the other one; at most ``enough``."""
    found = c = 0
    while found < enough and c < count[start]:
        i = candidates[start, c]
        found += cost[i, end] - cost[i, start] == difference
        c += 1
    return found


@kernel
def _move_rows(cost, worker, candidates, count, reach, start, end, difference, amount, outdated):
    """Move ``amount`` indifferent rows from one column to the other."""
    num_columns = cost.shape[1]
    for j in range(num_columns):
        outdated[j] = False
    c = count[start]
    while amount > 0:
        c -= 1
        i = candidates[start, c]
        own = cost[i, start]
        if cost[i, end] - own != difference:
            continue
        for j in range(num_columns):
            outdated[j] |= cost[i, j] - own == reach[start, j]
        count[start] -= 1
        candidates[start, c] = candidates[start, count[start]]
        candidates[end, count[end]] = i
        count[end] += 1
        for j in range(num_columns):
            reach[end, j] = min(reach[end, j], cost[i, j] - cost[i, end])
        worker[i] = end
        amount -= 1
    num_outdated = 0
    for j in range(num_columns):
        outdated[j] = outdated[j] and not _has_step(cost, candidates, count, start, j, reach[start, j])
        num_outdated += outdated[j]
    if 8 * num_outdated > num_columns:  # measuring all columns at once uses vector instructions
        _measure_reach(cost, candidates, count, start, reach)
        return
    for j in range(num_columns):
        if outdated[j]:
            reach[start, j] = _least_step(cost, candidates, count, start, j)


@kernel
def _has_step(cost, candidates, count, start, end, step):
    """Whether one of the first few candidates takes this step, as often happens with ties."""
    for c in range(min(NUM_TRIED_FOR_TIES, count[start])):
        i = candidates[start, c]
        if cost[i, end] - cost[i, start] == step:
            return True
    return False


@kernel
def _least_step(cost, candidates, count, start, end):
    least = FAR
    for c in range(count[start]):
        i = candidates[start, c]
        least = min(least, cost[i, end] - cost[i, start])
    return least
