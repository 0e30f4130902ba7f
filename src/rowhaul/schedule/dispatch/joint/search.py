"""Improving an assignment: samples move one by one to where they add least, and loads follow a price.

Every worker has a price for a place. A sample goes where what it adds to the cost, with all other
samples where they are now, plus the price of the place is least; each arrival raises the price, each
departure lowers it, by less and less. Loads so stay near the capacities; a few samples that are too
many at the end move to where there is room.
"""

from __future__ import annotations

import numpy as np
from numba import int64

from rowhaul._kernels import kernel
from rowhaul.schedule.dispatch.joint.spread import move, price_elsewhere
from rowhaul.schedule.dispatch.random import shuffle
from rowhaul.schedule.transportation.solver import solve

SLACK = 4  # samples that a worker may have too many while others are on the move
PRICED_SAMPLES = 1024  # enough to know the prices of places
DEAREST = 2**44  # `solve` needs costs of at most `largest_cost` of 64 columns


@kernel
def improve(problem, spread, worker, capacities, passes, seed):
    """Move every sample at most once per pass; updates ``worker`` and ``spread``."""
    num_samples, num_workers = problem.linear.shape
    load = np.zeros(num_workers, np.int64)
    for i in range(num_samples):
        load[worker[i]] += 1
    place_price = _place_prices(problem, spread, worker, capacities)
    step = _typical_price(problem) // 4
    order = np.arange(num_samples)
    shuffle(order, seed)
    price = np.empty((num_samples, num_workers), np.int64)
    for _ in range(passes):
        for place in range(num_samples):
            i = order[place]
            own = int64(worker[i])  # one type of worker: fewer kernels to compile
            price_elsewhere(problem, spread, i, own, price[i])
            best = own
            for j in range(num_workers):
                if (
                    load[j] < capacities[j] + SLACK
                    and capacities[j] > 0
                    and price[i, j] + place_price[j] < price[i, best] + place_price[best]
                ):
                    best = j
            if best != own:
                move(problem, spread, i, own, best)
                worker[i] = best
                load[own] -= 1
                load[best] += 1
                place_price[own] -= step
                place_price[best] += step
        step = max(1, step * 5 // 8)
    _move_surplus(problem, spread, worker, load, capacities, price)


@kernel
def _place_prices(problem, spread, worker, capacities):
    """The prices at which as many samples would go to every worker as it has places."""
    num_samples, num_workers = problem.linear.shape
    size = min(num_samples, PRICED_SAMPLES)
    price = np.empty((size, num_workers), np.int64)
    places = np.empty(num_workers, np.int64)
    total = before = 0
    for j in range(num_workers):
        total += capacities[j]
        places[j] = total * size // max(1, num_samples) - before
        before += places[j]
    for s in range(size):
        i = s * num_samples // size
        price_elsewhere(problem, spread, i, int64(worker[i]), price[s])
        least = price[s].min()
        for j in range(num_workers):
            price[s, j] = min(price[s, j] - least, DEAREST)
    place_price = np.zeros(num_workers, np.int64)
    solve(price, places, np.empty(size, np.int32), place_price)
    return place_price


@kernel
def _typical_price(problem):
    """What a worker adds, in the mean, to the price of a row that several train."""
    return int(problem.many.sum()) // max(1, problem.many.size)


@kernel
def _move_surplus(problem, spread, worker, load, capacities, price):
    """Move samples from workers that have too many, those first that lose least by the prices last seen."""
    num_samples, num_workers = price.shape
    for own in range(num_workers):
        while load[own] > capacities[own]:
            moved, to = int64(-1), int64(-1)
            for i in range(num_samples):
                if worker[i] != own:
                    continue
                for j in range(num_workers):
                    if load[j] < capacities[j] and (
                        moved < 0 or price[i, j] - price[i, own] < price[moved, to] - price[moved, own]
                    ):
                        moved, to = i, j
            move(problem, spread, moved, own, to)
            worker[moved] = to
            load[own] -= 1
            load[to] += 1
