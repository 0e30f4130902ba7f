"""Improving an assignment: samples move one by one to where they add least, and loads follow a price.

Every worker has a price for a place. A sample goes where what it adds to the cost, with all other
samples where they are now, plus the price of the place is least; each arrival raises the price, each
departure lowers it, by less and less. Loads so stay near the capacities; a few samples that are too
many at the end move to where there is room.

The time goes into looking at samples, so the budget is a number of looks. All samples are looked at once;
then, round by round, those that were nearest to moving when last looked at. What is skipped comes nearer each
time, since other samples have moved meanwhile. A round that moves hardly anything is the last.

In large batches samples are looked at in windows, and threads share the looks of a window. Its samples see
each other's moves only in the prices of places, without which they would all go to the same worker.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import int64

from rowhaul._kernels import kernel
from rowhaul._memory import data_address, prefetch_to_read
from rowhaul.schedule.dispatch.joint.problem import NEVER, Ints, Longs, Problem
from rowhaul.schedule.dispatch.joint.spread import Spread, move, price_elsewhere
from rowhaul.schedule.threads import (
    CLOSED,
    NONE_LEFT,
    Threads,
    await_parts,
    finish_part,
    next_part,
    open_step,
    rest,
)
from rowhaul.schedule.transportation.solver import solve

SLACK = 4  # samples that a worker may have too many while others are on the move
PRICED_SAMPLES = 1024  # enough to know the prices of places
LOOKED_AT = 4  # a round looks at one sample out of so many, or more where margins are alike
FEW_MOVES = 512  # the search ends with a round that moves fewer than one sample out of so many
REPRICED = 512  # samples of a worker, up to which a few that are too many are a part worth choosing well
FULL = 2**50  # the price of a place that there is not
HIGH, HIGHEST = 2**49, 2**62
WORKER_BITS, WORKER = 6, 63  # a price and its worker in one number: the least of them needs no branch
WINDOWS = 256  # of a batch: half as many, or twice, cost the same
PART = 16  # looks that a thread takes at a time


class Window(NamedTuple):
    """The samples that are looked at together, and what threads need and find."""

    sample: Ints
    to: npt.NDArray[np.int8]  # where each would go
    gain: Longs  # what it would gain there, but for the prices of places
    toll: Longs  # columns: prices of places, out of reach where there are none
    size: Longs  # how many samples there are


def improve(
    problem: Problem,
    spread: Spread,
    worker: Ints,
    capacities: Longs,
    passes: int,
    threads: Threads | None = None,
) -> None:
    """Look ``passes`` times at every sample, in the mean, and move those that gain.

    Updates ``worker`` and ``spread``.
    """
    num_samples, width = problem.linear.shape
    size = max(1, num_samples // WINDOWS)
    window = Window(
        np.empty(size, np.int32), np.empty(size, np.int8), np.empty(size, np.int64),
        np.zeros(width, np.int64), np.zeros(1, np.int64),
    )  # fmt: skip
    (threads or Threads()).lead(
        lambda board: _search(board, problem, spread, worker, capacities, passes, window),
        lambda board: _help(board, problem, spread, worker, window),
        (size + PART - 1) // PART,
    )


@kernel
def _search(board, problem, spread, worker, capacities, passes, window):
    num_samples, num_workers, size = len(worker), len(capacities), len(window.sample)
    load = np.zeros(num_workers, np.int64)
    for i in range(num_samples):
        load[worker[i]] += 1
    limit = np.zeros(num_workers, np.int64)
    for j in range(num_workers):
        limit[j] = capacities[j] + SLACK if capacities[j] > 0 else 0
    place_price, toll = _place_prices(problem, spread, worker, capacities), window.toll
    step = _typical_price(problem, num_workers) // 4
    for j in range(num_workers):
        toll[j] = place_price[j] + (0 if load[j] < limit[j] else FULL)
    price = np.empty(len(toll), np.int32)
    margin = np.zeros(num_samples, np.int64)  # how far each was from moving, or from staying
    looks_left, nearest = int64(passes * num_samples), int64(63)
    while looks_left > 0:
        num_moves = num_looks = 0
        i = 0
        while i < num_samples and num_looks < looks_left:
            count = 0
            while i < num_samples and count < size and num_looks < looks_left:
                if margin[i] >> nearest != 0:
                    margin[i] >>= 1
                else:
                    window.sample[count] = i
                    count += 1
                    num_looks += 1
                i += 1
            _look_together(board, problem, spread, worker, window, price, count)
            for s in range(count):
                mover = int64(window.sample[s])
                own, to = int64(worker[mover]), int64(window.to[s])
                gain = window.gain[s] + place_price[own] - toll[to]  # at the prices of places now
                margin[mover] = abs(gain) if gain > -HIGH else 0  # no place is left there: look again soon
                if gain <= 0 or to >= num_workers:  # a column without a worker, where no other place is left
                    continue
                num_moves += 1
                move(problem, spread, mover, own, to)
                worker[mover] = to
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
    _move_surplus(problem, spread, worker, load, capacities, margin)


@kernel
def _look_together(board, problem, spread, worker, window, price, count):
    """Look at the samples of the window, with the threads that are there."""
    if count <= PART:
        _look(problem, spread, worker, window, price, 0, count)
        return
    num_parts = (count + PART - 1) // PART
    window.size[0] = count
    open_step(board, num_parts)
    part = next_part(board)
    while part >= 0:
        _look(problem, spread, worker, window, price, part * PART, min(count, (part + 1) * PART))
        finish_part(board)
        part = next_part(board)
    await_parts(board, num_parts)


@kernel
def _help(board, problem, spread, worker, window):
    price = np.empty(len(window.toll), np.int32)
    spins, part = 0, int64(NONE_LEFT)
    while part != CLOSED:
        part = next_part(board)
        if part >= 0:
            end = min(window.size[0], (part + 1) * PART)
            _look(problem, spread, worker, window, price, part * PART, end)
            finish_part(board)
            spins = 0
        else:
            spins = rest(spins)


@kernel
def _look(problem, spread, worker, window, price, first, end):
    """Find where samples of the window would go."""
    lines, line_bytes = data_address(spread.lines), spread.lines.itemsize * spread.lines.shape[1]
    linear, linear_bytes = data_address(problem.linear), problem.linear.itemsize * problem.linear.shape[1]
    for s in range(first, end):
        if s + 1 < end:
            following = window.sample[s + 1]
            prefetch_to_read(linear + following * linear_bytes)
            for at in range(problem.offsets[following], problem.offsets[following + 1]):
                prefetch_to_read(lines + problem.rows[at] * line_bytes)
        i = int64(window.sample[s])
        own = int64(worker[i])
        price_elsewhere(problem, spread, i, own, price)
        here = int64(price[own])
        price[own] = NEVER
        best = int64(HIGHEST)
        for j in range(len(price)):
            best = min(best, (price[j] + window.toll[j]) << WORKER_BITS | j)
        to = best & WORKER
        window.to[s], window.gain[s] = to, here - price[to]


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
    """Move samples from workers that have too many, those first that lose least.

    What each would lose is its margin when last looked at; in small batches it is found anew.
    """
    price = np.empty(problem.linear.shape[1], np.int32)
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
            move(problem, spread, moved, own, to)
            worker[moved] = to
            load[own] -= 1
            load[to] += 1


@kernel
def _cheapest(price, load, capacities):
    """The cheapest worker that has room."""
    best = int64(-1)
    for j in range(len(capacities)):
        if load[j] < capacities[j] and (best < 0 or price[j] < price[best]):
            best = int64(j)
    return best
