"""The slots of the directory: a record of each row that the window or a cache names, and loops over them."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_read, prefetch_to_write
from rowhaul.schedule.directory.row_index import (
    index_delete,
    index_find,
    index_place,
    index_set,
    index_value,
)
from rowhaul.schedule.masks import NOBODY, popcount
from rowhaul.schedule.row_states import FRESH, HOME, NOT_ADMITTED, REPLICATED
from rowhaul.schedule.threads import take

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
        # The last iteration that trained it: a split row's gradients are from then; or, of a replicated row,
        # `UNTRAINED`.
        ("trained", np.int32),
        ("head", np.int32),  # the first of its copies in caches, or -1
    ],
    align=True,
)
NEVER = -1  # the stamp of a slot that no batch has named
UNTRAINED = -1  # of replicated rows: no batch has named them yet, so only workers have them
AHEAD = 16  # rows between asking for a cache line and using it
MOST_APPEARANCES = np.int32(1 << 30)  # no row is infrequent beyond


@kernel
def locate_slots(
    tables,
    keys,
    index,
    slots,
    number,
    window_begins,
    edges,
    counter,
    batch_slots,
    previous_batch,
    previous_local,
):
    """Find the slots of the distinct rows of a batch, -1 of rows that have none, in chunks.

    A row that no batch since ``window_begins`` has named is used next in this one. Also fills in which batch
    named each row before, and where it stands there.
    """
    mask = np.int64(len(index) - 1)
    index_address, slots_address = np.int64(index.ctypes.data), np.int64(slots.ctypes.data)
    first_place = np.empty(edges[1] - edges[0] if len(edges) > 1 else 0, np.int64)
    chunk = take(counter)
    while chunk < len(edges) - 1:
        begin, end = edges[chunk], edges[chunk + 1]
        for r in range(begin, end):
            first_place[r - begin] = index_place(index, tables[r], keys[r])
        for r in range(begin, end):
            # Two stages: ask for the place in the index, then, when it has come, for the slot that it names.
            if r + 2 * AHEAD < end:
                prefetch_to_read(index_address + first_place[r - begin + 2 * AHEAD] * 16)
            if r + AHEAD < end:
                likely = index_value(index[first_place[r - begin + AHEAD], 1])
                prefetch_to_write(slots_address + max(likely, 0) * slots.itemsize)
            table, key, place = tables[r], keys[r], first_place[r - begin]
            word = index[place, 1]
            while word != 0 and not (index[place, 0] == key and (word >> 32) == table):
                place = (place + 1) & mask
                word = index[place, 1]
            slot = index_value(word)
            batch_slots[r] = slot
            if slot >= 0:
                record = slots[slot]
                previous_batch[r] = record.stamp
                previous_local[r] = record.local
                _name(record, number, r, window_begins)
        chunk = take(counter)


@kernel
def make_slots(
    tables, keys, index, slots, free_slots, num_free, number, window_begins, batch_slots, previous_batch
):
    """Make slots for the rows of a batch that have none; returns the rows, and the free slots left."""
    count = np.int64(0)
    for slot in batch_slots:
        count += slot < 0
    new = np.empty(count, np.int32)
    found = 0
    for r in range(len(batch_slots)):
        if batch_slots[r] < 0:
            new[found] = r
            found += 1
    index_address, slots_address = np.int64(index.ctypes.data), np.int64(slots.ctypes.data)
    for i in range(count):
        if i + AHEAD < count:
            coming = new[i + AHEAD]
            prefetch_to_write(index_address + index_place(index, tables[coming], keys[coming]) * 16)
        r = new[i]
        num_free -= 1
        slot = np.int64(free_slots[num_free])
        prefetch_to_write(slots_address + free_slots[max(num_free - AHEAD, 0)] * slots.itemsize)
        index_set(index, index_find(index, tables[r], keys[r]), tables[r], keys[r], slot)
        record = slots[slot]
        begin_slot(record, tables[r], keys[r])
        batch_slots[r] = slot
        previous_batch[r] = NEVER
        _name(record, number, r, window_begins)
    return new, num_free


@register_jitable
def _name(record, number, place, window_begins):
    """Note that a batch names a row."""
    if record.stamp < window_begins:
        record.next_use = number
    record.stamp = number
    record.local = place
    record.window += 1


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
def take_up(
    slots, number, appearances, batch_slots, next_use, occurrences, trainers, edges, counter, held, fresh,
    most_moves,
):  # fmt: skip
    """Begin iteration ``number``, in chunks: record when each row is used next, and which rows caches hold.

    ``appearances`` is empty unless a dispatcher learns from them. Fills ``held``, 0 for rows that no cache
    holds (replicated rows live beside the caches, rows not admitted nowhere), and ``fresh``, 1 for fresh
    rows; and for each chunk how many moves its rows can cause at most.
    """
    slots_address = np.int64(slots.ctypes.data)
    chunk = take(counter)
    while chunk < len(edges) - 1:
        begin, end = edges[chunk], edges[chunk + 1]
        most = np.int64(0)
        for r in range(begin, end):
            if r + AHEAD < end:
                prefetch_to_write(slots_address + np.int64(batch_slots[r + AHEAD]) * slots.itemsize)
            slot = batch_slots[r]
            record = slots[slot]
            record.next_use = next_use[r]
            if len(appearances) > 0:
                appearances[slot] = min(appearances[slot], MOST_APPEARANCES) + occurrences[r]
            record.window -= 1
            state = record.state
            fresh[r] = state == FRESH
            held[r] = state != REPLICATED and state != NOT_ADMITTED
            if state == REPLICATED:
                record.trained = number
            if held[r]:
                most += 1 + 2 * popcount(trainers[r]) + popcount(record.members)
        most_moves[chunk] = most
        chunk = take(counter)


@kernel
def release_slots(slots, candidates, index, free_slots, num_free):
    """Free the slots that neither the window nor a cache names; their rows are at home or not admitted."""
    index_address, slots_address = np.int64(index.ctypes.data), np.int64(slots.ctypes.data)
    mask = np.int64(len(index) - 1)
    leaving = np.empty(len(candidates), np.int32)
    places = np.empty(len(candidates), np.int64)  # in the index: where the search for each begins
    count = 0
    for i in range(len(candidates)):
        if i + AHEAD < len(candidates):
            prefetch_to_write(slots_address + np.int64(candidates[i + AHEAD]) * slots.itemsize)
        slot = candidates[i]
        record = slots[slot]
        if record.window == 0 and record.stamp != NEVER and record.head < 0:
            record.stamp = NEVER  # so that a candidate named twice is given back once
            leaving[count] = slot
            places[count] = index_place(index, record.table, record.key)
            count += 1
    for i in range(count):
        if i + AHEAD < count:
            prefetch_to_write(index_address + places[i + AHEAD] * 16)
        place = places[i]
        while (
            index_value(index[place, 1]) != leaving[i]
        ):  # a slot is one row's, so the row need not be compared
            place = (place + 1) & mask
        index_delete(index, place)
        free_slots[num_free] = leaving[i]
        num_free += 1
    return num_free


@kernel
def name_rows(slots, named, edges, counter, tables, keys):
    """Fill in the tables and keys of the rows in slots, in chunks."""
    slots_address = np.int64(slots.ctypes.data)
    chunk = take(counter)
    while chunk < len(edges) - 1:
        for i in range(edges[chunk], edges[chunk + 1]):
            if i + AHEAD < len(named):
                prefetch_to_read(slots_address + np.int64(named[i + AHEAD]) * slots.itemsize)
            tables[i] = slots[named[i]].table
            keys[i] = slots[named[i]].key
        chunk = take(counter)
