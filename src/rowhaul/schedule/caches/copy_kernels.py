"""Compiled loops over the copies of rows, whatever the policy: finding, adding and removing them.

Copies of a batch's rows are scattered over memory that no fast cache holds, and a list of copies can
only be followed step by step. The loops therefore follow many lists at once, or ask for memory some
rows ahead of its use.
"""

from __future__ import annotations

import numpy as np
from numba import int64

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_write
from rowhaul.schedule.masks import NOBODY, ONE, lowest, popcount

_BLOCK = 512  # rows whose lists of copies are followed together
_AHEAD = 16  # how many rows ahead of their use scattered memory is asked for


@kernel
def look_up(slots, trainers, head, copies, size, in_bytes, demand):
    """List the (row, worker) pairs of a batch by row, then worker; nothing changes but ``demand``.

    Returns of every pair the position of the row in ``slots``, the worker, and its copy, -1 where it
    has none. Adds up in ``demand``, zeroed, what each worker needs (see `DEMAND`).
    """
    num_rows = len(slots)
    num_pairs = 0
    for i in range(num_rows):
        num_pairs += popcount(trainers[i])
    pair_rows = np.empty(num_pairs, np.int32)
    pair_workers = np.empty(num_pairs, np.int8)
    pair_copies = np.empty(num_pairs, np.int32)

    # Of the rows of a block: each worker's copy; and the lists that have not ended yet.
    copy_of = np.empty((_BLOCK, len(demand)), np.int32)
    rows = np.empty(_BLOCK, np.int32)
    fronts = np.empty(_BLOCK, np.int32)
    workers = np.empty(_BLOCK, np.int32)
    following = np.empty(_BLOCK, np.int32)
    pair = 0
    for first in range(0, num_rows, _BLOCK):
        num_block = min(_BLOCK, num_rows - first)
        for row in range(num_block):
            following[row] = head[slots[first + row]]
            rows[row] = row
        copy_of[:num_block] = -1
        num_lists = num_block
        while True:
            num_going_on = 0
            for i in range(num_lists):
                copy = following[i]
                rows[num_going_on] = rows[i]
                fronts[num_going_on] = copy
                num_going_on += copy >= 0
            num_lists = num_going_on
            if num_lists == 0:
                break
            for i in range(num_lists):
                workers[i] = copies[fronts[i]].worker
                following[i] = copies[fronts[i]].next
            for i in range(num_lists):
                copy_of[rows[i], workers[i]] = fronts[i]
        for row in range(num_block):
            room = size[slots[first + row]] if in_bytes else 1
            mask = trainers[first + row]
            while mask != NOBODY:
                worker = lowest(mask)
                mask &= mask - ONE
                needs = demand[worker]
                if needs.num_rows == 0 or room < needs.smallest:
                    needs.smallest = room
                needs.num_rows += 1
                needs.room += room
                copy = copy_of[row, worker]
                missing = copy < 0
                needs.num_missing += missing
                needs.missing_room += missing * room
                pair_rows[pair] = first + row
                pair_workers[pair] = worker
                pair_copies[pair] = copy
                pair += 1
    return pair_rows, pair_workers, pair_copies


@kernel
def release(victims, head, copies):
    """Take copies out of the lists of their rows; returns whose they were and of which rows."""
    num_victims = len(victims)
    workers = np.empty(num_victims, np.int16)
    slots = np.empty(num_victims, np.int32)
    for i in range(num_victims):
        workers[i] = copies[victims[i]].worker
        slots[i] = copies[victims[i]].slot
    heads_at = int64(head.ctypes.data)
    for i in range(num_victims):
        if i + _AHEAD < num_victims:
            prefetch_to_write(heads_at + slots[i + _AHEAD] * head.strides[0])
        slot, victim = slots[i], victims[i]
        following = copies[victim].next
        before = head[slot]
        if before == victim:
            head[slot] = following
        else:
            while copies[before].next != victim:
                before = copies[before].next
            copies[before].next = following
    return workers, slots


@kernel
def insert(iteration, slots, pair_rows, pair_workers, pair_copies, free, num_free, head, copies):
    """Give every pair without a copy a new one off the stack ``free``; returns how many are left there."""
    for pair in range(len(pair_rows)):
        if pair_copies[pair] >= 0:
            continue
        num_free -= 1
        copy = free[num_free]
        slot = slots[pair_rows[pair]]
        record = copies[copy]
        record.slot = slot
        record.next = head[slot]
        record.worker = pair_workers[pair]
        record.last_use = iteration
        head[slot] = copy
        pair_copies[pair] = copy
    return num_free
