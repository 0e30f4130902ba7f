"""Compiled loops of the dispatchers: prices of rows, greedy allocation, the true cost of an assignment."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul.schedule.id_kernels import row_hash
from rowhaul.schedule.masks import NOBODY, ONE, bit, trainers_of


@kernel
def random_bits(seed, number):
    """64 random bits, the same everywhere for the same two numbers."""
    return row_hash(seed, number)


@kernel
def shuffle(values, seed):
    """Put values into a random order, in place."""
    for last in range(len(values) - 1, 0, -1):
        other = np.int64(random_bits(seed, last) % np.uint64(last + 1))
        values[last], values[other] = values[other], values[last]


@kernel
def price_rows(latest, owner, free, home, record_size, prices, peer_to_peer):
    """Rows x workers: what it costs to bring the latest record of a row to one worker."""
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
    """Samples x workers: the costs of each sample's rows, added up."""
    num_samples, num_workers = len(offsets) - 1, row_costs.shape[1]
    sums = np.zeros((num_samples, num_workers), np.int64)
    for i in range(num_samples):
        for at in range(offsets[i], offsets[i + 1]):
            x = rows[at]
            for j in range(num_workers):
                sums[i, j] += row_costs[x, j]
    return sums


@kernel
def regrets(costs, smaller, larger):
    """For each row of costs, its ``larger``-th smallest value less its ``smaller``-th, counted from 0."""
    num_samples, num_workers = costs.shape
    differences = np.empty(num_samples, np.int64)
    least = np.empty(larger + 1, np.int64)
    for i in range(num_samples):
        least[:] = np.iinfo(np.int64).max
        for j in range(num_workers):
            value = costs[i, j]
            for place in range(larger + 1):
                if value < least[place]:
                    value, least[place] = least[place], value
        differences[i] = least[larger] - least[smaller]
    return differences


@kernel
def allocate_cheapest(costs, order, room, worker):
    """Give samples, in order, to their cheapest worker with room; ``room`` is used up."""
    for i in order:
        best = -1
        for j in range(len(room)):
            if room[j] > 0 and (best < 0 or costs[i, j] < costs[i, best]):
                best = j
        worker[i] = best
        room[best] -= 1


@kernel
def allocate_by_score(offsets, rows, latest, scored, room, seed, first, step, worker):
    """Give samples first, first + step, ... to the worker with room that holds most of their latest rows.

    Only rows that are ``scored`` count, or all where it is None. Ties are broken at random, by the
    sample's number; ``room`` is used up.
    """
    num_workers = len(room)
    score = np.empty(num_workers, np.int64)
    for i in range(first, len(offsets) - 1, step):
        score[:] = 0
        for at in range(offsets[i], offsets[i + 1]):
            x = rows[at]
            if scored is not None and not scored[x]:
                continue
            holders = np.int64(latest[x])
            for j in range(num_workers):
                score[j] += (holders >> j) & 1
        best, num_best = np.int64(-1), 0
        for j in range(num_workers):
            if room[j] > 0:
                if score[j] > best:
                    best, num_best = score[j], 1
                elif score[j] == best:
                    num_best += 1
        skipped = np.int64(random_bits(seed, i) % np.uint64(num_best))
        for j in range(num_workers):
            if room[j] > 0 and score[j] == best:
                if skipped == 0:
                    worker[i] = j
                    room[j] -= 1
                    break
                skipped -= 1


@kernel
def cost_of_row(trainers, latest, owner, partial, home, record_size, value_size, prices, peer_to_peer):
    """What moves because ``trainers`` (a mask, not empty) train one row that is not free."""
    direct = peer_to_peer and owner >= 0
    receiver = owner if direct else home  # of gradients; -1 is a store with a link of its own
    receiver_price = prices[receiver] if receiver >= 0 else 0
    owner_trains = owner >= 0 and trainers & bit(owner) != NOBODY
    alone = trainers & (trainers - ONE) == NOBODY
    cost = np.int64(0)
    if not direct and owner >= 0 and owner != home and not (alone and owner_trains):
        cost += record_size * (prices[owner] + receiver_price)
    needs_state = direct and not owner_trains  # several trainers, the owner not among them: one gets it all
    for j in range(len(prices)):
        if j == receiver:
            continue
        if partial & bit(j) != NOBODY:
            cost += value_size * (prices[j] + receiver_price)
        if trainers & ~latest & bit(j) != NOBODY:
            size = record_size if alone or needs_state else value_size
            needs_state = False
            cost += size * (prices[j] + receiver_price)
    return cost


@kernel
def total_cost(trainers, latest, owner, partial, free, home, record_size, value_size, prices, peer_to_peer):
    """The cost of all rows that are trained."""
    cost = np.int64(0)
    for x in range(len(trainers)):
        if trainers[x] != 0 and free[x] == 0:
            cost += cost_of_row(
                trainers[x],
                latest[x],
                owner[x],
                partial[x],
                home[x],
                record_size[x],
                value_size[x],
                prices,
                peer_to_peer,
            )
    return cost


@kernel
def cheapest_assignment(
    offsets,
    rows,
    capacities,
    latest,
    owner,
    partial,
    free,
    home,
    record_size,
    value_size,
    prices,
    peer_to_peer,
):
    """The cheapest of all assignments, the first in lexicographic order among equals."""
    num_samples, num_workers = len(offsets) - 1, len(capacities)
    room = capacities.copy()
    worker = np.full(num_samples, -1, np.int32)
    best = worker.copy()
    least = np.int64(-1)
    i = 0
    while i >= 0:  # sample i is the one to be moved on to its next worker
        if i == num_samples:
            trainers = trainers_of(offsets, rows, worker, len(latest))
            cost = total_cost(
                trainers, latest, owner, partial, free, home, record_size, value_size, prices, peer_to_peer
            )
            if least < 0 or cost < least:
                least, best = cost, worker.copy()
            i -= 1
            continue
        if worker[i] >= 0:
            room[worker[i]] += 1
        worker[i] += 1
        while worker[i] < num_workers and room[worker[i]] == 0:
            worker[i] += 1
        if worker[i] == num_workers:
            worker[i] = -1
            i -= 1
        else:
            room[worker[i]] -= 1
            i += 1
    return best
