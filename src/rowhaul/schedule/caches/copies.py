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
from rowhaul.schedule.masks import NOBODY, ONE, bit, lowest, popcount
from rowhaul.schedule.threads import part_of, take

_BLOCK = 256  # rows whose lists of copies are followed together, at most,
_BLOCK_COPIES = 8192  # and the copies that they may have: more would not stay in the fastest memory
_AHEAD = 16  # rows between asking for a cache line and using it

COPY = np.dtype(
    [
        ("slot", np.int32),
        ("next", np.int32),  # another copy of the same slot, or -1
        ("previous", np.int32),  # the copy that this one follows, or -1: a copy leaves without a search
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
        self.copies["previous"][taken] = np.where(begins, -1, np.roll(taken, 1))
        self.head[slots[begins]] = taken[begins]
        return taken

    def victims(self, num_victims: int) -> npt.NDArray[np.int32]:
        """The copies that were just put on the stack, in order."""
        return self.free[self.num_free : self.num_free + num_victims]


@kernel
def count_pairs(slots, trainers, size, in_bytes, edges, needed):
    """Where the (row, worker) pairs of each chunk begin, and where the last one's end.

    Adds up in ``needed``, zeroed, the room that each worker needs.
    """
    pair_edges = np.zeros(len(edges), np.int64)
    for chunk in range(len(edges) - 1):
        count = np.int64(0)
        for i in range(edges[chunk], edges[chunk + 1]):
            room = size[slots[i]] if in_bytes else 1
            mask = trainers[i]
            count += popcount(mask)
            while mask != NOBODY:
                needed[lowest(mask)] += room
                mask &= mask - ONE
        pair_edges[chunk + 1] = pair_edges[chunk] + count
    return pair_edges


@kernel
def look_up(
    iteration, slots, trainers, head, copies, size, in_bytes, edges, pair_edges, counter,
    demands, pair_rows, pair_workers, pair_copies,
):  # fmt: skip
    """List the (row, worker) pairs of a batch by row, then worker, in chunks, and mark copies as used.

    Fills in of every pair the position of the row in ``slots``, the worker, and its copy, -1 where it has
    none; and in ``demands``, zeroed, what each worker needs for each chunk (see `DEMAND`).
    """
    num_workers = demands.shape[1]
    block = min(_BLOCK, max(_BLOCK_COPIES // num_workers, 64))
    # Of the rows of a block: who has copies, and which; and the lists that have not ended yet.
    copy_of = np.empty((block, num_workers), np.int32)
    holders = np.empty(block, np.uint64)
    rows = np.empty(block, np.int32)
    fronts = np.empty(block, np.int32)
    workers = np.empty(block, np.int32)
    following = np.empty(block, np.int32)
    chunk = take(counter)
    while chunk < len(edges) - 1:
        demand = demands[chunk]
        pair = pair_edges[chunk]
        for first in range(edges[chunk], edges[chunk + 1], block):
            num_block = min(block, edges[chunk + 1] - first)
            for row in range(num_block):
                following[row] = head[slots[first + row]]
                rows[row] = row
                holders[row] = NOBODY
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
                    holders[rows[i]] |= bit(workers[i])
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
                    copy = np.int32(-1)
                    if holders[row] & bit(worker) != NOBODY:
                        copy = copy_of[row, worker]
                        copies[copy].last_use = iteration
                    else:
                        needs.num_missing += 1
                        needs.missing_room += room
                    pair_rows[pair] = first + row
                    pair_workers[pair] = worker
                    pair_copies[pair] = copy
                    pair += 1
        chunk = take(counter)


@kernel
def add_up(demands, total):
    """Add up what workers need, in ``total``; leave in each chunk what those before it need.

    The smallest room is that of all.
    """
    for worker in range(len(total)):
        needs = total[worker]
        for chunk in range(len(demands)):
            here = demands[chunk, worker]
            num_rows, num_missing = here.num_rows, here.num_missing
            if num_rows > 0 and (needs.num_rows == 0 or here.smallest < needs.smallest):
                needs.smallest = here.smallest
            here.num_rows, here.num_missing = needs.num_rows, needs.num_missing
            needs.num_rows += num_rows
            needs.num_missing += num_missing
            needs.missing_room += here.missing_room


@kernel
def copies_of(victims, copies, edges, counter, workers, slots):
    """Fill in, in chunks, whose copies these are, and of which rows."""
    copies_at = int64(copies.ctypes.data)
    chunk = take(counter)
    while chunk < len(edges) - 1:
        for i in range(edges[chunk], edges[chunk + 1]):
            if i + _AHEAD < len(victims):
                prefetch_to_write(copies_at + victims[i + _AHEAD] * copies.itemsize)
            workers[i] = copies[victims[i]].worker
            slots[i] = copies[victims[i]].slot
        chunk = take(counter)


@kernel
def release(victims, slots, head, copies, num_parts, counter):
    """Take copies out of the lists of their rows; ``slots`` are the rows, divided among the parts."""
    heads_at = int64(head.ctypes.data)
    num_victims = len(victims)
    part = take(counter)
    while part < num_parts:
        for i in range(num_victims):
            if num_parts > 1 and part_of(slots[i], num_parts) != part:
                continue
            if i + _AHEAD < num_victims:
                prefetch_to_write(heads_at + slots[i + _AHEAD] * head.strides[0])
            gone = copies[victims[i]]
            if gone.previous >= 0:
                copies[gone.previous].next = gone.next
            else:
                head[slots[i]] = gone.next
            if gone.next >= 0:
                copies[gone.next].previous = gone.previous
        part = take(counter)


@kernel
def insert(
    iteration, slots, pair_rows, pair_workers, pair_copies, free, num_free, head, copies,
    pair_edges, missing_before, counter,
):  # fmt: skip
    """Give every pair without a copy a new one off the stack ``free``, in chunks."""
    heads_at, copies_at = int64(head.ctypes.data), int64(copies.ctypes.data)
    chunk = take(counter)
    while chunk < len(pair_edges) - 1:
        top = num_free - missing_before[chunk]
        for pair in range(pair_edges[chunk], pair_edges[chunk + 1]):
            if pair + _AHEAD < len(pair_rows):
                prefetch_to_write(heads_at + slots[pair_rows[pair + _AHEAD]] * head.strides[0])
            if pair_copies[pair] >= 0:
                continue
            top -= 1
            copy = free[top]
            prefetch_to_write(copies_at + free[max(top - _AHEAD, 0)] * copies.itemsize)
            slot = slots[pair_rows[pair]]
            record = copies[copy]
            record.slot = slot
            record.next = head[slot]
            record.previous = -1
            record.worker = pair_workers[pair]
            record.last_use = iteration
            if record.next >= 0:
                copies[record.next].previous = copy
            head[slot] = copy
            pair_copies[pair] = copy
        chunk = take(counter)
