"""The assignment that `joint` starts from: workers grow, each taking the sample that costs it least more.

Dear links come first: their workers choose among all samples, so they find samples whose rows they
have or whose rows come together, and the cheap ones take what is left.
"""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel

STRATUM = 1024  # samples looked at together: the time grows with the square of it
TAKEN = 2**61  # more than any score, and far from overflow


@kernel
def grow(problem, prices, capacities):
    """A worker for every sample; capacities add up to the samples."""
    num_samples, num_workers = problem.linear.shape
    num_rows = len(problem.sole)
    hoped = _hoped_prices(problem)
    covered = np.zeros((num_rows, num_workers), np.bool_)
    worker = np.full(num_samples, -1, np.int32)
    room, left = np.empty(num_workers, np.int64), capacities.copy()
    num_strata = (num_samples + STRATUM - 1) // STRATUM
    for stratum in range(num_strata):
        first, end = stratum * num_samples // num_strata, (stratum + 1) * num_samples // num_strata
        total = before = 0
        for j in range(num_workers):  # its part of what is left
            total += left[j]
            room[j] = total * (end - first) // (num_samples - first) - before
            before += room[j]
            left[j] -= room[j]
        _grow_stratum(problem, prices, hoped, covered, room, first, end, worker)
    return worker


@kernel
def _hoped_prices(problem):
    """The prices of rows as the first sample to need them sees them: lower where many may come to share."""
    num_rows, num_workers = problem.sole.shape
    uses = np.zeros(num_rows, np.int64)
    for at in range(len(problem.rows)):
        uses[problem.rows[at]] += 1
    hoped = np.empty((num_rows, num_workers), np.int64)
    for x in range(num_rows):
        share = np.int64(256)
        while uses[x] > 1:  # about the power -0.3 of the uses
            uses[x] //= 2
            share = share * 13 // 16
        for j in range(num_workers):
            hoped[x, j] = problem.sole[x, j] * share // 256
    return hoped


@kernel
def _grow_stratum(problem, prices, hoped, covered, room, first, end, worker):
    num_workers = len(prices)
    starts, samples = _samples_by_row(problem, first, end)
    score = np.empty((num_workers, end - first), np.int64)
    own = np.empty(num_workers, np.int64)
    for i in range(first, end):
        for j in range(num_workers):
            own[j] = problem.linear[i, j]
        for at in range(problem.offsets[i], problem.offsets[i + 1]):
            x = problem.rows[at]
            for j in range(num_workers):
                own[j] += 0 if covered[x, j] else hoped[x, j]
        for j in range(num_workers):
            score[j, i - first] = own[j]

    all_room = room.copy()
    for _ in range(end - first):
        j = _next_to_grow(prices, room, all_room)
        least = score[j].min()
        i = 0
        while score[j, i] != least:
            i += 1
        for other in range(num_workers):
            score[other, i] = TAKEN
        worker[first + i] = j
        room[j] -= 1
        for at in range(problem.offsets[first + i], problem.offsets[first + i + 1]):
            x = problem.rows[at]
            if not covered[x, j]:
                covered[x, j] = True
                for s in range(starts[x], starts[x + 1]):
                    score[j, samples[s]] -= hoped[x, j]


@kernel
def _next_to_grow(prices, room, all_room):
    """The worker whose price times the share of its room that is left is highest."""
    best = -1
    for j in range(len(room)):
        if room[j] > 0 and (
            best < 0 or prices[j] * room[j] * all_room[best] > prices[best] * room[best] * all_room[j]
        ):
            best = j
    return best


@kernel
def _samples_by_row(problem, first, end):
    """The samples first .. end that need each row, counted from ``first``."""
    num_rows = len(problem.sole)
    starts = np.zeros(num_rows + 2, np.int64)
    for at in range(problem.offsets[first], problem.offsets[end]):
        starts[problem.rows[at] + 2] += 1
    for x in range(num_rows):
        starts[x + 2] += starts[x + 1]
    samples = np.empty(problem.offsets[end] - problem.offsets[first], np.int32)
    for i in range(first, end):
        for at in range(problem.offsets[i], problem.offsets[i + 1]):
            x = problem.rows[at]
            samples[starts[x + 1]] = i - first
            starts[x + 1] += 1
    return starts[: num_rows + 1], samples
