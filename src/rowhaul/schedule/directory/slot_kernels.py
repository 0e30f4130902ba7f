"""Compiled loops of the directory: finding the distinct rows of a batch, and giving their slots back."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_read, prefetch_to_write
from rowhaul.schedule.directory.codes import HOME
from rowhaul.schedule.directory.index_kernels import index_delete, index_find, index_set, index_value
from rowhaul.schedule.id_kernels import row_hash
from rowhaul.schedule.masks import NOBODY

NEVER = -1  # the stamp of a slot that no batch has named
AHEAD = 16  # ids between asking for a cache line and using it


@kernel
def locate(tables, keys, index, slots, free_slots, num_free, number, window_begins):
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
        first_place[r] = np.int64(row_hash(tables[r], keys[r])) & mask
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
    """A row that was not known is at home, as far as its slot can tell."""
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
def sorted_rows(tables, keys, count):
    """The order of the first ``count`` rows by (table, key): a radix sort of bytes, lowest first."""
    digits = np.zeros((8, 256), np.int64)
    words = np.empty(count, np.uint64)
    largest_table = np.int64(0)
    for r in range(count):
        word = np.uint64(keys[r]) ^ np.uint64(1 << 63)  # negative keys before positive ones
        words[r] = word
        for b in range(8):
            digits[b, (word >> np.uint64(8 * b)) & np.uint64(255)] += 1
        largest_table = max(largest_table, np.int64(tables[r]))
    order = np.arange(count).astype(np.int32)
    other = np.empty(count, np.int32)
    for b in range(8):
        if _one_bucket(digits[b], count):
            continue
        start = 0
        for value in range(256):
            size = digits[b, value]
            digits[b, value] = start
            start += size
        for r in range(count):
            d = order[r]
            value = (words[d] >> np.uint64(8 * b)) & np.uint64(255)
            other[digits[b, value]] = d
            digits[b, value] += 1
        order, other = other, order
    starts = np.zeros(largest_table + 2, np.int64)
    for r in range(count):
        starts[tables[r] + 1] += 1
    for table in range(largest_table + 1):
        starts[table + 1] += starts[table]
    for r in range(count):
        d = order[r]
        other[starts[tables[d]]] = d
        starts[tables[d]] += 1
    return other


@kernel
def _one_bucket(sizes, count):
    for size in sizes:
        if size == count:
            return True
        if size > 0:
            return False
    return True


@kernel
def release(slots, candidates, index, free_slots, num_free):
    """Give back the slots that no window and no cache names any more; they are at home, or not admitted."""
    mask = np.int64(len(index) - 1)
    index_address = np.int64(index.ctypes.data)
    leaving = np.empty(len(candidates), np.int32)
    count = 0
    for slot in candidates:
        record = slots[slot]
        if record.window == 0 and record.stamp != NEVER and record.head < 0:
            record.stamp = NEVER  # so that a candidate named twice is given back once
            leaving[count] = slot
            count += 1
            place = np.int64(row_hash(record.table, record.key)) & mask
            prefetch_to_write(index_address + place * 16)
    for slot in leaving[:count]:
        record = slots[slot]
        index_delete(index, index_find(index, record.table, record.key))
        free_slots[num_free] = slot
        num_free += 1
    return num_free
