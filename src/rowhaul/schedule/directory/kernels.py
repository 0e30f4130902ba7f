"""Compiled loops of the directory: its index, and finding the distinct rows of a batch.

The index is open addressing with linear probing over pairs of 64-bit words: the key, then
(table << 32 | value + 1); an all-zero second word is an empty place. One probe is one cache line.
"""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_read, prefetch_to_write
from rowhaul.schedule.directory.states import State
from rowhaul.schedule.kernels import home_shard, row_hash
from rowhaul.schedule.masks import NOBODY, ONE, bit, lowest

FRESH, HOME = np.uint8(State.FRESH), np.uint8(State.HOME)
OWNED, SPLIT = np.uint8(State.OWNED), np.uint8(State.SPLIT)
REPLICATED, NOT_ADMITTED = np.uint8(State.REPLICATED), np.uint8(State.NOT_ADMITTED)
LOW = np.int64(0xFFFFFFFF)
NEVER = -1  # the stamp of a slot that no batch has named
AHEAD = 16  # ids between asking for a cache line and using it


@kernel
def index_find(index, table, key):
    """The place of a row in the index; its second word is 0 if the row is not there."""
    mask = np.int64(len(index) - 1)
    place = np.int64(row_hash(table, key)) & mask
    while True:
        word = index[place, 1]
        if word == 0 or (index[place, 0] == key and (word >> 32) == table):
            return place
        place = (place + 1) & mask


@kernel
def index_value(word):
    """The value in a place's second word."""
    return (word & LOW) - 1


@kernel
def index_set(index, place, table, key, value):
    """Write a row and its value into a place found by `index_find`."""
    index[place, 0] = key
    index[place, 1] = (np.int64(table) << 32) | (np.int64(value) + 1)


@kernel
def index_delete(index, place):
    """Empty a place and close the gap: later rows of the run move up, so that no tombstones remain."""
    mask = np.int64(len(index) - 1)
    hole = place
    probe = (place + 1) & mask
    while index[probe, 1] != 0:
        wanted = np.int64(row_hash(index[probe, 1] >> 32, index[probe, 0])) & mask
        if ((probe - wanted) & mask) >= ((probe - hole) & mask):
            index[hole, 0] = index[probe, 0]
            index[hole, 1] = index[probe, 1]
            hole = probe
        probe = (probe + 1) & mask
    index[hole, 1] = 0


@kernel
def index_rehash(old, new):
    """Copy all rows of one index into an empty, larger one."""
    for place in range(len(old)):
        word = old[place, 1]
        if word != 0:
            at = index_find(new, word >> 32, old[place, 0])
            new[at, 0] = old[place, 0]
            new[at, 1] = word


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


@kernel
def describe(slots, batch_slots, next_use, number, num_shards, peer_to_peer, record_sizes, value_sizes):
    """A batch's rows in a dispatcher's terms; ``num_shards`` is 0 where no worker stores rows.

    Returns tables, latest, owner, partial, free, home, record_size, value_size and next_use as
    `DispatchTask` has them.
    """
    count = len(batch_slots)
    tables = np.empty(count, np.int32)
    latest = np.empty(count, np.uint64)
    owner = np.empty(count, np.int16)
    partial = np.empty(count, np.uint64)
    free = np.empty(count, np.uint8)
    home = np.empty(count, np.int16)
    record_size = np.empty(count, np.int64)
    value_size = np.empty(count, np.int64)
    until_next_use = np.empty(count, np.int32)
    slots_address = np.int64(slots.ctypes.data)
    for r in range(count):
        if r + AHEAD < count:
            prefetch_to_read(slots_address + np.int64(batch_slots[r + AHEAD]) * slots.itemsize)
        record = slots[batch_slots[r]]
        table, state, members = record.table, record.state, record.members
        tables[r] = table
        latest[r] = NOBODY
        owner[r] = -1
        partial[r] = NOBODY
        free[r] = 0
        if state == HOME:
            latest[r] = members
        elif state == OWNED:
            latest[r] = members
            owner[r] = lowest(members)
        elif state == SPLIT:
            partial[r] = members
            if peer_to_peer and record.settled == NOBODY and record.base != NOBODY:
                # One of the workers will put it together and is then its owner.
                owner[r] = lowest(members & record.base)
                latest[r] = bit(owner[r])
        else:
            free[r] = 1
        home[r] = home_shard(table, record.key, num_shards) if num_shards > 0 else -1
        record_size[r] = record_sizes[table]
        value_size[r] = value_sizes[table]
        until_next_use[r] = next_use[r] - number if next_use[r] > 0 else 0
    return tables, latest, owner, partial, free, home, record_size, value_size, until_next_use


@kernel
def describe_after(
    trainers, owner, has_state, states, shared, places, on_demand, keeps_copies, bounded, peer_to_peer,
    next_latest, next_owner, next_partial, next_free,
):  # fmt: skip
    """Where rows that two batches share are when the first has been trained, in the second's terms."""
    for s in range(len(shared)):
        r, place = shared[s], places[s]
        if states[r] == REPLICATED or states[r] == NOT_ADMITTED:
            continue
        by = trainers[r]
        single = by & (by - ONE) == NOBODY
        next_free[place] = 0
        next_owner[place] = -1
        next_partial[place] = NOBODY
        if bounded:
            next_latest[place] |= by
        else:
            next_latest[place] = by if keeps_copies and single else NOBODY
        if on_demand:
            if single:
                next_owner[place] = lowest(by)
            else:
                next_partial[place] = by
                if peer_to_peer and owner[r] >= 0:
                    # The record from before the step is on a peer, which will put the row together.
                    trains = has_state[r] and by & bit(owner[r]) != NOBODY
                    next_owner[place] = owner[r] if trains else lowest(by)
                    next_latest[place] = bit(next_owner[place])
