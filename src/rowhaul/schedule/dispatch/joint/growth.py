"""The assignment that `joint` starts from: workers grow, each taking the sample that costs it least more.

Dear links come first: their workers choose among all samples, so they find samples whose rows they
have or whose rows come together, and the cheap ones take what is left.
"""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel

STRATUM = 512  # samples looked at together
BLOCK = 32  # samples among which the least is found at once
TAKEN = 2**30  # more than any score


@kernel
def grow(problem, prices, capacities):
    """A worker for every sample; capacities add up to the samples."""
    num_samples, num_workers = len(problem.linear), len(prices)
    hoped = _hoped_prices(problem)
    worker = np.full(num_samples, -1, np.int32)
    room, left = np.empty(num_workers, np.int64), capacities.copy()
    num_strata = (num_samples + STRATUM - 1) // STRATUM
    score = np.empty((num_workers, (STRATUM + BLOCK - 1) // BLOCK * BLOCK), np.int32)
    for stratum in range(num_strata):
        first, end = stratum * num_samples // num_strata, (stratum + 1) * num_samples // num_strata
        total = before = 0
        for j in range(num_workers):  # its part of what is left
            total += left[j]
            room[j] = total * (end - first) // (num_samples - first) - before
            before += room[j]
            left[j] -= room[j]
        _grow_stratum(problem, prices, hoped, score, room, first, end, worker)
    return worker


@kernel
def _hoped_prices(problem):
    """The prices of rows as the first sample to need them sees them: lower where many may come to share."""
    num_rows, width = problem.sole.shape
    hoped = np.empty((num_rows, width), np.int32)
    for x in range(num_rows):
        share, uses = np.int64(256), np.int64(problem.uses[x])
        while uses > 1:  # about the power -0.3 of the uses
            uses //= 2
            share = share * 13 // 16
        for j in range(width):
            hoped[x, j] = problem.sole[x, j] * share // 256
    return hoped


@kernel
def _grow_stratum(problem, prices, hoped, score, room, first, end, worker):
    """Deal the samples first .. end; ``hoped`` becomes 0 where a worker gets a row."""
    num_workers, width = len(prices), hoped.shape[1]
    starts, samples = problem.starts, problem.samples
    own = np.empty(width, np.int32)
    for i in range(first, end):
        for j in range(width):
            own[j] = problem.linear[i, j]
        for at in range(problem.offsets[i], problem.offsets[i + 1]):
            x = problem.rows[at]
            for j in range(width):
                own[j] += hoped[x, j]
        for j in range(num_workers):
            score[j, i - first] = own[j]
    for j in range(num_workers):
        score[j, end - first :] = TAKEN

    all_room = room.copy()
    urgency = np.empty(num_workers, np.int64)
    for j in range(num_workers):
        urgency[j] = prices[j] << 20 if room[j] > 0 else -1
    for _ in range(end - first):
        best = 0
        for other in range(1, num_workers):
            if urgency[other] > urgency[best]:
                best = other
        j = best
        i = _least(score[j])
        for other in range(num_workers):
            score[other, i] = TAKEN
        worker[first + i] = j
        room[j] -= 1
        urgency[j] = (prices[j] * room[j] << 20) // all_room[j] if room[j] > 0 else -1
        for at in range(problem.offsets[first + i], problem.offsets[first + i + 1]):
            x = problem.rows[at]
            hope = hoped[x, j]
            if hope != 0:
                hoped[x, j] = 0
                at_sample = starts[x]
                while at_sample < starts[x + 1] and samples[at_sample] < first:
                    at_sample += 1
                while at_sample < starts[x + 1] and samples[at_sample] < end:
                    score[j, samples[at_sample] - first] -= hope
                    at_sample += 1


@kernel
def _least(values):
    """The place of the least value, the first of equals."""
    least, block = np.int32(TAKEN), 0
    for start in range(0, len(values), BLOCK):
        lowest = np.int32(TAKEN)
        for lane in range(BLOCK):
            value = values[start + lane]
            lowest = value if value < lowest else lowest
        if lowest < least:
            least, block = lowest, start
    place = block
    while values[place] != least:
        place += 1
    return place
