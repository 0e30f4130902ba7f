"""The slots of the directory: a record of each row that the window or a cache names, and loops over them."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_read, prefetch_to_write
from rowhaul.schedule.directory.row_index import (
    index_delete,
    index_find,
    index_place,
    index_set,
    index_value,
)
from rowhaul.schedule.masks import NOBODY, ONE, popcount
from rowhaul.schedule.row_states import FRESH, HOME, NOT_ADMITTED, REPLICATED

# One cache line. Masks have bit j for worker j.
SLOT = np.dtype(
    [
        ("key", np.int64),
        ("members", np.uint64),  # HOME: clean copies; OWNED: the owner; SPLIT: who owes a gradient (U)
        ("settled", np.uint64),  # SPLIT: who has handed its gradient to the home (P)
        ("base", np.uint64),  # SPLIT: who holds the record from before the step; 0 is the home
        ("table", np.int32),
        ("state", np.uint8),
        ("window", np.int16),  # batches in the window that name the row
        ("touched", np.int32),  # the last iteration that trained, moved or evicted the row, or -1
        ("next_use", np.int32),  # the next iteration in the window that needs the row, or 0
        ("stamp", np.int32),  # the last batch that named it
        ("local", np.int32),  # its place there
        ("trained", np.int32),  # the last iteration that trained it: a split row's gradients are from then
        ("head", np.int32),  # the first of its copies in caches, or -1
    ],
    align=True,
)
NEVER = -1  # the stamp of a slot that no batch has named
AHEAD = 16  # rows between asking for a cache line and using it
MOST_APPEARANCES = np.int32(1 << 30)  # no row is infrequent beyond


@kernel
def locate_slots(tables, keys, index, slots, free_slots, num_free, number, window_begins):
    """Find the slots of the distinct rows of a batch, making slots for rows not known yet.

    A row that no batch since ``window_begins`` has named is used next in this one.
    Returns the slots; which batch named each row before, and where it stands there; the rows that are
    new; and the free slots left.
    """
    count = len(keys)
    mask = np.int64(len(index) - 1)
    index_address, slots_address = np.int64(index.ctypes.data), np.int64(slots.ctypes.data)
    first_place = np.empty(count, np.int64)
    for r in range(count):
        first_place[r] = index_place(index, tables[r], keys[r])
    batch_slots = np.empty(count, np.int32)
    previous_batch = np.empty(count, np.int32)
    previous_local = np.empty(count, np.int32)
    new = np.empty(count, np.int32)
    num_new = 0
    for r in range(count):
        # Two stages: ask for the place in the index, then, when it has come, for the slot that it names.
        if r + 2 * AHEAD < count:
            prefetch_to_read(index_address + first_place[r + 2 * AHEAD] * 16)
        if r + AHEAD < count:
            likely = index_value(index[first_place[r + AHEAD], 1])
            prefetch_to_write(slots_address + max(likely, 0) * slots.itemsize)
        table, key, place = tables[r], keys[r], first_place[r]
        word = index[place, 1]
        while word != 0 and not (index[place, 0] == key and (word >> 32) == table):
            place = (place + 1) & mask
            word = index[place, 1]
        if word != 0:
            slot = index_value(word)
            record = slots[slot]
        else:
            num_free -= 1
            slot = np.int64(free_slots[num_free])
            prefetch_to_write(slots_address + free_slots[max(num_free - AHEAD, 0)] * slots.itemsize)
            index_set(index, place, table, key, slot)
            record = slots[slot]
            begin_slot(record, table, key)
            new[num_new] = r
            num_new += 1
        batch_slots[r] = slot
        previous_batch[r] = record.stamp
        previous_local[r] = record.local
        if record.stamp < window_begins:
            record.next_use = number
        record.stamp = number
        record.local = r
        record.window += 1
    return batch_slots, previous_batch, previous_local, new[:num_new].copy(), num_free


@kernel
def begin_slot(record, table, key):
    """Initialise the slot of a row: at home."""
    record.key = key
    record.table = table
    record.state = HOME
    record.members = NOBODY
    record.settled = NOBODY
    record.base = NOBODY
    record.touched = -1
    record.next_use = 0
    record.window = 0
    record.stamp = NEVER


@kernel
def link_uses(previous_batch, previous_local, earlier, next_use, number):
    """Note in an earlier batch of the window which of its rows batch ``number`` names next."""
    for r in range(len(previous_batch)):
        if previous_batch[r] == earlier:
            next_use[previous_local[r]] = number


@kernel
def set_state(slots, batch_slots, state):
    """Put rows into a state."""
    for slot in batch_slots:
        slots[slot].state = state


@kernel
def take_up(slots, appearances, batch_slots, next_use, occurrences, trainers, keep_split):
    """Begin an iteration: record when each row is used next, and select the rows that caches hold.

    ``appearances`` is empty unless a dispatcher learns from them.
    Returns the slots, the trainers and the workers whose copies stay worth something of the rows
    that do; the slots of those that do not (replicated rows live beside the caches, rows not admitted
    nowhere); which rows are fresh; and how many moves all of them can cause at most.
    """
    cached = np.empty(len(batch_slots), np.int32)
    by = np.empty(len(batch_slots), np.uint64)
    current = np.empty(len(batch_slots), np.uint64)
    others = np.empty(len(batch_slots), np.int32)
    fresh = np.empty(len(batch_slots), np.int32)
    count = 0
    num_fresh = 0
    most_moves = 0
    slots_address = np.int64(slots.ctypes.data)
    for r in range(len(batch_slots)):
        if r + AHEAD < len(batch_slots):
            prefetch_to_write(slots_address + np.int64(batch_slots[r + AHEAD]) * slots.itemsize)
        record = slots[batch_slots[r]]
        record.next_use = next_use[r]
        if len(appearances) > 0:
            appearances[batch_slots[r]] = min(appearances[batch_slots[r]], MOST_APPEARANCES) + occurrences[r]
        record.window -= 1
        fresh[num_fresh] = r
        num_fresh += record.state == FRESH
        if record.state == REPLICATED or record.state == NOT_ADMITTED:
            others[r - count] = batch_slots[r]
            continue
        most_moves += 1 + 2 * popcount(trainers[r]) + popcount(record.members)
        cached[count] = batch_slots[r]
        by[count] = trainers[r]
        single = trainers[r] & (trainers[r] - ONE) == NOBODY
        current[count] = trainers[r] if keep_split or single else NOBODY
        count += 1
    others = others[: len(batch_slots) - count]
    return cached[:count], by[:count], current[:count], others, fresh[:num_fresh], most_moves


@kernel
def release_slots(slots, candidates, index, free_slots, num_free):
    """Free the slots that neither the window nor a cache names; their rows are at home or not admitted."""
    index_address = np.int64(index.ctypes.data)
    leaving = np.empty(len(candidates), np.int32)
    count = 0
    for slot in candidates:
        record = slots[slot]
        if record.window == 0 and record.stamp != NEVER and record.head < 0:
            record.stamp = NEVER  # so that a candidate named twice is given back once
            leaving[count] = slot
            count += 1
            prefetch_to_write(index_address + index_place(index, record.table, record.key) * 16)
    for slot in leaving[:count]:
        record = slots[slot]
        index_delete(index, index_find(index, record.table, record.key))
        free_slots[num_free] = slot
        num_free += 1
    return num_free
