"""Improving an assignment: samples move one by one to where they add least, and loads follow a price.

Every worker has a price for a place. A sample goes where what it adds to the cost, with all other
samples where they are now, plus the price of the place is least; each arrival raises the price, each
departure lowers it, by less and less. Loads so stay near the capacities; a few samples that are too
many at the end move to where there is room.

The time goes into looking at samples, so the budget is a number of looks. All samples are looked at once;
then, round by round, those that were nearest to moving when last looked at. What is skipped comes nearer each
time, since other samples have moved meanwhile. A round that moves hardly anything is the last.
"""

from __future__ import annotations

import numpy as np
from numba import int64

from rowhaul._kernels import kernel
from rowhaul.schedule.dispatch.joint.problem import NEVER
from rowhaul.schedule.dispatch.joint.spread import move, price_elsewhere
from rowhaul.schedule.transportation.solver import solve

SLACK = 4  # samples that a worker may have too many while others are on the move
PRICED_SAMPLES = 1024  # enough to know the prices of places
LOOKED_AT = 4  # a round looks at one sample out of so many, or more where margins are alike
FEW_MOVES = 512  # the search ends with a round that moves fewer than one sample out of so many
REPRICED = 512  # samples of a worker, up to which a few that are too many are a part worth choosing well
FULL = 2**50  # the price of a place that there is not
HIGHEST = 2**62
WORKER_BITS, WORKER = 6, 63  # a price and its worker in one number: the least of them needs no branch


@kernel
def improve(problem, spread, worker, capacities, passes):
    """Look ``passes`` times at every sample, in the mean, and move those that gain.

    Updates ``worker`` and ``spread``; returns what the cost grew by.
    """
    num_samples, num_workers, width = len(worker), len(capacities), problem.linear.shape[1]
    load = np.zeros(num_workers, np.int64)
    for i in range(num_samples):
        load[worker[i]] += 1
    limit = np.zeros(num_workers, np.int64)
    for j in range(num_workers):
        limit[j] = capacities[j] + SLACK if capacities[j] > 0 else 0
    place_price = _place_prices(problem, spread, worker, capacities)
    step = _typical_price(problem, num_workers) // 4
    toll = np.zeros(width, np.int64)  # prices of places, out of reach where there are none
    for j in range(num_workers):
        toll[j] = place_price[j] + (0 if load[j] < limit[j] else FULL)
    price = np.empty(width, np.int32)
    margin = np.zeros(num_samples, np.int64)  # how far each was from moving, or from staying
    growth = int64(0)
    looks_left, nearest = int64(passes * num_samples), int64(63)
    while looks_left > 0:
        num_moves = num_looks = 0
        for i in range(num_samples):
            if margin[i] >> nearest != 0:
                margin[i] >>= 1
                continue
            if num_looks == looks_left:
                break
            num_looks += 1
            own = int64(worker[i])
            price_elsewhere(problem, spread, i, own, price)
            here = int64(price[own])
            price[own] = NEVER
            best = int64(HIGHEST)
            for j in range(width):
                best = min(best, (price[j] + toll[j]) << WORKER_BITS | j)
            to, gain = best & WORKER, here + place_price[own] - (best >> WORKER_BITS)
            margin[i] = abs(gain)
            if gain > 0:
                num_moves += 1
                growth += price[to] - here
                move(problem, spread, i, own, to)
                worker[i] = to
                load[own] -= 1
                load[to] += 1
                place_price[own] -= step
                place_price[to] += step
                toll[own] = place_price[own] + (0 if load[own] < limit[own] else FULL)
                toll[to] = place_price[to] + (0 if load[to] < limit[to] else FULL)
        step = max(1, step * (5 if num_looks == num_samples else 7) // 8)
        looks_left -= num_looks
        if num_moves * FEW_MOVES < num_samples:
            break
        nearest = _nearest(margin)
    return growth + _move_surplus(problem, spread, worker, load, capacities, margin)


@kernel
def _nearest(margin):
    """The bits below which the margins of enough samples are."""
    count = np.zeros(64, np.int64)
    for i in range(len(margin)):
        value, bits = margin[i], 0
        while value > 0:
            value >>= 1
            bits += 1
        count[bits] += 1
    bits, total = int64(0), count[0]
    while total * LOOKED_AT < len(margin):
        bits += 1
        total += count[bits]
    return bits


@kernel
def _place_prices(problem, spread, worker, capacities):
    """The prices at which as many samples would go to every worker as it has places."""
    num_samples, num_workers = len(worker), len(capacities)
    size = min(num_samples, PRICED_SAMPLES)
    cost = np.empty((size, num_workers), np.int64)
    price = np.empty(problem.linear.shape[1], np.int32)
    places = np.empty(num_workers, np.int64)
    total = before = 0
    for j in range(num_workers):
        total += capacities[j]
        places[j] = total * size // max(1, num_samples) - before
        before += places[j]
    for s in range(size):
        i = s * num_samples // size
        price_elsewhere(problem, spread, i, int64(worker[i]), price)
        least = price.min()
        for j in range(num_workers):
            cost[s, j] = price[j] - least
    place_price = np.zeros(num_workers, np.int64)
    solve(cost, places, np.empty(size, np.int32), place_price)
    return place_price


@kernel
def _typical_price(problem, num_workers):
    """What a worker adds, in the mean, to the price of a row that several train."""
    return int(problem.many.sum()) // max(1, len(problem.many) * num_workers)


@kernel
def _move_surplus(problem, spread, worker, load, capacities, margin):
    """Move samples from workers that have too many, those first that lose least; returns what is lost.

    What each would lose is its margin when last looked at; in small batches it is found anew.
    """
    price = np.empty(problem.linear.shape[1], np.int32)
    lost = int64(0)
    for own in range(len(capacities)):
        if capacities[own] < load[own] <= REPRICED:
            for i in range(len(worker)):
                if worker[i] == own:
                    price_elsewhere(problem, spread, i, own, price)
                    margin[i] = price[_cheapest(price, load, capacities)] - int64(price[own])
        while load[own] > capacities[own]:
            moved = int64(-1)
            for i in range(len(worker)):
                if worker[i] == own and (moved < 0 or margin[i] < margin[moved]):
                    moved = i
            price_elsewhere(problem, spread, moved, own, price)  # others have moved since
            to = _cheapest(price, load, capacities)
            lost += price[to] - int64(price[own])
            move(problem, spread, moved, own, to)
            worker[moved] = to
            load[own] -= 1
            load[to] += 1
    return lost


@kernel
def _cheapest(price, load, capacities):
    """The cheapest worker that has room."""
    best = int64(-1)
    for j in range(len(capacities)):
        if load[j] < capacities[j] and (best < 0 or price[j] < price[best]):
            best = int64(j)
    return best
