"""The copies of all workers: one growable array, so that memory follows what is cached, and loops over it.

A row that the directory knows has a *slot*; a *copy* is one worker's cached copy of it. The copies of a slot
form a list that starts at ``head[slot]``, which lies in the directory's record of the row. Free copies are on
a stack.

Copies of a batch's rows are scattered over memory that no fast cache holds, and a list of copies can only be
followed step by step. The loops therefore follow many lists at once, or ask for memory some rows ahead.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import int64

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_write
from rowhaul.schedule.arrays import extended, extended_stack
from rowhaul.schedule.masks import NOBODY, ONE, lowest, popcount

_BLOCK = 512  # rows whose lists of copies are followed together
_AHEAD = 16  # rows between asking for a cache line and using it

COPY = np.dtype(
    [
        ("slot", np.int32),
        ("next", np.int32),  # another copy of the same slot, or -1
        ("worker", np.int32),
        ("last_use", np.int32),  # the iteration in which its worker trained the row last
    ]
)


class CopyPool:
    """The copies of all workers' caches, found by slot.

    Arrays are replaced when they grow: fetch them anew after every step of the caches.
    """

    def __init__(self) -> None:
        self.head = np.zeros(0, np.int32)  # slots: the first copy of each, or -1
        self.copies = np.zeros(0, COPY)  # those in use and those that are free
        self.free = np.zeros(0, np.int32)  # a stack with room for all copies
        self.num_free = 0

    def __len__(self) -> int:
        return len(self.free)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the pool's own arrays, in use or not."""
        return self.copies.nbytes + self.free.nbytes

    def reserve(self, num_copies: int) -> None:
        """Make at least this many copies free."""
        short = num_copies - self.num_free
        if short <= 0:
            return
        old = len(self)
        new = old + max(short, old // 2)
        self.copies = extended(self.copies, new)
        self.free = extended_stack(self.free, self.num_free, new)
        self.num_free += new - old

    def take(
        self, slots: npt.NDArray[np.int32], workers: npt.NDArray[np.int32], last_use: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Create copies of rows that have none, given slot by slot; returns them."""
        self.reserve(len(slots))
        self.num_free -= len(slots)
        taken = self.free[self.num_free : self.num_free + len(slots)].copy()
        goes_on = np.append(slots[:-1] == slots[1:], False)[: len(slots)]
        self.copies["slot"][taken] = slots
        self.copies["worker"][taken] = workers
        self.copies["last_use"][taken] = last_use
        self.copies["next"][taken] = np.where(goes_on, np.roll(taken, -1), -1)
        begins = np.append(True, ~goes_on[:-1])[: len(slots)]
        self.head[slots[begins]] = taken[begins]
        return taken

    def victims(self, num_victims: int) -> npt.NDArray[np.int32]:
        """The copies that were just put on the stack, in order."""
        return self.free[self.num_free : self.num_free + num_victims]


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
