"""Compiled loops of the directory: finding the distinct rows of a batch, and giving their slots back."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_read, prefetch_to_write
from rowhaul.schedule.directory.codes import HOME
from rowhaul.schedule.directory.index_kernels import index_delete, index_find, index_set, index_value
from rowhaul.schedule.kernels import row_hash
from rowhaul.schedule.masks import NOBODY

NEVER = -1  # the stamp of a slot that no batch has named
AHEAD = 16  # ids between asking for a cache line and using it


@kernel
def locate(offsets, tables, keys, index, slots, free_slots, num_free, number):
    """Name the distinct rows of a batch by their slots, making slots for rows not known yet.

    Returns the samples' offsets and their rows as indices into the distinct ones (a row once per
    sample); of the distinct rows, ordered by (table, key), the slots, tables, keys, how many samples
    name each, which batch named it before, where it stands there, and whether it is new; and the
    free slots left.
    """
    num_ids = len(keys)
    num_samples = len(offsets) - 1
    new_offsets = np.zeros(num_samples + 1, np.int64)
    rows = np.empty(num_ids, np.int32)
    distinct = np.empty(num_ids, np.int32)
    occurrences = np.empty(num_ids, np.int32)
    previous_batch = np.empty(num_ids, np.int32)
    previous_local = np.empty(num_ids, np.int32)
    last_sample = np.empty(num_ids, np.int32)
    is_new = np.empty(num_ids, np.bool_)
    distinct_tables = np.empty(num_ids, np.int32)
    distinct_keys = np.empty(num_ids, np.int64)
    slot_of = np.empty(num_ids, np.int64)
    num_known = find_or_make(tables, keys, index, slots, free_slots, num_free, slot_of)
    slots_address = np.int64(slots.ctypes.data)
    count = 0
    filled = 0
    for i in range(num_samples):
        for at in range(offsets[i], offsets[i + 1]):
            if at + AHEAD < num_ids:
                prefetch_to_write(slots_address + slot_of[at + AHEAD] * slots.itemsize)
            slot = slot_of[at]
            record = slots[slot]
            if record.stamp != number:
                is_new[count] = record.stamp == NEVER
                previous_batch[count] = record.stamp
                previous_local[count] = record.local
                record.stamp = number
                record.local = count
                distinct[count] = slot
                distinct_tables[count] = tables[at]
                distinct_keys[count] = keys[at]
                occurrences[count] = 0
                last_sample[count] = -1
                count += 1
            local = record.local
            if last_sample[local] != i:
                last_sample[local] = i
                occurrences[local] += 1
                rows[filled] = local
                filled += 1
        new_offsets[i + 1] = filled
    order = sorted_rows(distinct_tables, distinct_keys, count)
    rank = np.empty(count, np.int32)
    for r in range(count):
        rank[order[r]] = r
    for at in range(filled):
        rows[at] = rank[rows[at]]
    ordered = np.empty(count, np.int32)
    ordered_tables = np.empty(count, np.int32)
    ordered_keys = np.empty(count, np.int64)
    ordered_occurrences = np.empty(count, np.int32)
    ordered_previous_batch = np.empty(count, np.int32)
    ordered_previous_local = np.empty(count, np.int32)
    ordered_new = np.empty(count, np.bool_)
    for r in range(count):
        d = order[r]
        ordered[r] = distinct[d]
        ordered_tables[r] = distinct_tables[d]
        ordered_keys[r] = distinct_keys[d]
        ordered_occurrences[r] = occurrences[d]
        ordered_previous_batch[r] = previous_batch[d]
        ordered_previous_local[r] = previous_local[d]
        ordered_new[r] = is_new[d]
        record = slots[distinct[d]]
        record.local = r
        record.window += 1
    return (
        new_offsets,
        rows[:filled].copy(),
        ordered,
        ordered_tables,
        ordered_keys,
        ordered_occurrences,
        ordered_previous_batch,
        ordered_previous_local,
        ordered_new,
        num_known,
    )


@kernel
def find_or_make(tables, keys, index, slots, free_slots, num_free, slot_of):
    """The slot of every id, making slots for rows not known yet; returns the free slots left."""
    mask = np.int64(len(index) - 1)
    index_address = np.int64(index.ctypes.data)
    first_place = np.empty(len(keys), np.int64)
    for at in range(len(keys)):
        first_place[at] = np.int64(row_hash(tables[at], keys[at])) & mask
    for at in range(len(keys)):
        if at + AHEAD < len(keys):
            prefetch_to_read(index_address + first_place[at + AHEAD] * 16)
        table, key, place = tables[at], keys[at], first_place[at]
        word = index[place, 1]
        while word != 0 and not (index[place, 0] == key and (word >> 32) == table):
            place = (place + 1) & mask
            word = index[place, 1]
        if word != 0:
            slot_of[at] = index_value(word)
            continue
        num_free -= 1
        slot = free_slots[num_free]
        slot_of[at] = slot
        index_set(index, place, table, key, slot)
        record = slots[slot]
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
    return num_free


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
