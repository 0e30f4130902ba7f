"""Batches over the shards of an index: looking keys up without locks, changing them shard by shard.

Looking up reads memory that others may be changing. Each key remembers its shard's version from before the
search; if that was not the version afterwards, or the shard has moved, the key is looked up again under the
lock. ``seen`` are the shards' rows as last published, together with references to the memory they
point to: it cannot vanish under a reader. ``rows`` are the living ones.

Changing takes a batch's keys grouped by shard. Each shard is locked once for all of its keys, in any order:
a busy one is left for later, so that several batches walk over the shards behind each other.
"""

from __future__ import annotations

import numpy as np
from numba import int64, uint64
from numba.extending import register_jitable

from rowhaul._atomic import load_acquire, order_reads
from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_read, prefetch_to_write, read_word, write_word
from rowhaul._scramble import scrambled, unscrambled
from rowhaul.store.shards import (
    ADDRESS,
    EMPTY,
    LINE_BYTES,
    MOST_KEYS,
    MOST_SHARD_BITS,
    NUM_KEYS,
    NUM_MOVES,
    ROW_BYTES,
    SHARD_BITS,
    close_gap,
    first_line,
    has_end,
    location_from,
    put,
    shard_of,
    slot_from,
    try_lock,
    unlock,
)

INSERT, DISCARD = range(2)
BUSY = NO_ROOM = -2  # instead of a location
_SPINS = 64  # looks at a lock before another shard is tried
_AHEAD = 16  # keys between asking for a line and changing it
_BLOCK = 64  # keys looked up at a time: their hashes are computed together, their lines fetched together
_WORDS, _OFFSETS, _VERSIONS, _LINES = (8 * _BLOCK * part for part in range(4))  # of a block, in its scratch


@register_jitable
def _row(rows, table, shard):
    """Address of the row of a table's shard."""
    return rows + ROW_BYTES * ((table << MOST_SHARD_BITS) + shard)


@register_jitable
def _bits(rows, table):
    """By how many bits the shards of a table are chosen."""
    return int64(read_word(_row(rows, table, 0) + 8 * SHARD_BITS))


@register_jitable
def _find_locked(rows, table, word):
    """A key's location, under the lock of its shard; BUSY if the lock is not to be had now."""
    shard_bits = _bits(rows, table)
    row = _row(rows, table, shard_of(unscrambled(word), shard_bits))
    location = int64(BUSY)
    if not try_lock(row, 2):
        return location
    if _bits(rows, table) == shard_bits:
        location = location_from(first_line(row, word), word)
    unlock(row, False)
    return location


@register_jitable
def _prepare(rows, seen, offset, word, scratch, j):
    """Ask for the lines of key ``j`` of a block, and note where they are and its shard's version."""
    at = scratch + 8 * j
    write_word(at + _VERSIONS, uint64(load_acquire(rows + offset)))
    line = first_line(seen + offset, word)
    write_word(at + _LINES, uint64(line))
    prefetch_to_read(line)
    prefetch_to_read(line + LINE_BYTES)  # a shard that is three quarters full needs it every third time


@register_jitable
def _finish(rows, seen, scratch, count, locations):
    """Look up the prepared keys of a block; the number of those that are BUSY as their shard is locked."""
    for j in range(count):
        at = scratch + 8 * j
        write_word(
            locations + 8 * j, uint64(location_from(int64(read_word(at + _LINES)), read_word(at + _WORDS)))
        )
    order_reads()
    changed = read_word(rows + 8 * NUM_MOVES) ^ read_word(seen + 8 * NUM_MOVES)
    for j in range(count):
        at = scratch + 8 * j
        version, offset = read_word(at + _VERSIONS), int64(read_word(at + _OFFSETS))
        changed |= (version & uint64(1)) | (read_word(rows + offset) ^ version)
    num_busy = 0
    if changed == 0:
        return num_busy
    for j in range(count):
        at = scratch + 8 * j
        version, offset = int64(read_word(at + _VERSIONS)), int64(read_word(at + _OFFSETS))
        moved = read_word(rows + offset + 8 * ADDRESS) != read_word(seen + offset + 8 * ADDRESS)
        if moved or version & 1 or load_acquire(rows + offset) != version:
            location = _find_locked(rows, offset // (ROW_BYTES << MOST_SHARD_BITS), read_word(at + _WORDS))
            write_word(locations + 8 * j, uint64(location))
            num_busy += location == BUSY
    return num_busy


@kernel
def find_keys(rows, seen, starts, keys, locations):
    """Locations of the keys, EMPTY if absent, BUSY if their shard is locked; ``starts`` cuts them by table.

    Returns the number of those that are BUSY, since a locked shard does not keep the others waiting, and
    of those that are absent.
    """
    num_busy, num_absent = 0, 0
    memory = np.empty(4 * _BLOCK, np.uint64)
    scratch = int64(memory.ctypes.data)
    for table in range(len(starts) - 1):
        shard_bits = _bits(seen, table)
        for begin in range(starts[table], starts[table + 1], _BLOCK):
            count = min(_BLOCK, starts[table + 1] - begin)
            for j in range(count):
                memory[j] = scrambled(keys[begin + j])
                memory[_BLOCK + j] = uint64(_row(0, table, shard_of(keys[begin + j], shard_bits)))
            for j in range(count):
                _prepare(rows, seen, int64(memory[_BLOCK + j]), memory[j], scratch, j)
            num_busy += _finish(rows, seen, scratch, count, int64(locations.ctypes.data) + 8 * begin)
            for j in range(begin, begin + count):
                num_absent += locations[j] == EMPTY
    return num_busy, num_absent


@kernel
def find_each_key(rows, seen, tables, keys, locations):
    """The same for keys of any order of tables: ``tables`` has each key's own."""
    num_busy = 0
    memory = np.empty(4 * _BLOCK, np.uint64)
    scratch = int64(memory.ctypes.data)
    for begin in range(0, len(keys), _BLOCK):
        count = min(_BLOCK, len(keys) - begin)
        for j in range(count):
            table = int64(tables[begin + j])
            offset = _row(0, table, shard_of(keys[begin + j], _bits(seen, table)))
            memory[j] = scrambled(keys[begin + j])
            memory[_BLOCK + j] = uint64(offset)
            _prepare(rows, seen, offset, memory[j], scratch, j)
        num_busy += _finish(rows, seen, scratch, count, int64(locations.ctypes.data) + 8 * begin)
    return num_busy


@kernel
def group_keys(rows, keys, starts, positions, table_bits, words, items, bounds, pending):
    """Bring together the keys at ``positions`` (ascending) that are of the same shard.

    Fills ``table_bits`` (by table: how shards are chosen); the words of the keys and their places in
    ``positions``, row by row; ``bounds``, zeros at first, with each row's first and one past its last. Lists
    the rows that have any in ``pending`` and returns their number.
    """
    for table in range(len(table_bits)):
        table_bits[table] = _bits(rows, table)
    table = 0
    for item in range(len(positions)):
        while positions[item] >= starts[table + 1]:
            table += 1
        shard = shard_of(keys[positions[item]], table_bits[table])
        bounds[(table << MOST_SHARD_BITS) + shard, 1] += 1
    before, num_rows = 0, 0
    for row in range(len(bounds)):
        count = bounds[row, 1]
        bounds[row, 0] = bounds[row, 1] = before
        before += count
        if count > 0:
            pending[num_rows] = row
            num_rows += 1
    table = 0
    for item in range(len(positions)):
        while positions[item] >= starts[table + 1]:
            table += 1
        key = keys[positions[item]]
        row = (table << MOST_SHARD_BITS) + shard_of(key, table_bits[table])
        words[bounds[row, 1]] = scrambled(key)
        items[bounds[row, 1]] = item
        bounds[row, 1] += 1
    return num_rows


@register_jitable
def _change(operation, row, word, location):
    """Change one key of a locked shard; its location after (INSERT) or before, or NO_ROOM at the end."""
    slot = slot_from(first_line(row, word), word)
    held = int64(read_word(slot + 8)) if read_word(slot) == word else int64(EMPTY)
    num_keys = int64(read_word(row + 8 * NUM_KEYS))
    if operation == INSERT and held == EMPTY:
        if not has_end(row):
            return int64(NO_ROOM)
        put(slot, word, uint64(location))
        write_word(row + 8 * NUM_KEYS, uint64(num_keys + 1))
        return location
    if operation == DISCARD and held != EMPTY:
        close_gap(row, slot)
        write_word(row + 8 * NUM_KEYS, uint64(num_keys - 1))
    return held


@register_jitable
def _change_shard(operation, row, rows, r, table_bits, words, items, bounds, given, results):
    """Change the keys of a locked shard; False if it cannot be done or not be finished."""
    first, last = bounds[r, 0], bounds[r, 1] - 1
    if _bits(rows, r >> MOST_SHARD_BITS) != table_bits[r >> MOST_SHARD_BITS]:
        return False
    num_keys = int64(read_word(row + 8 * NUM_KEYS))
    if operation == INSERT and num_keys + last + 1 - first > int64(read_word(row + 8 * MOST_KEYS)):
        return False
    for g in range(first, last + 1):
        line = first_line(row, words[min(g + _AHEAD, last)])
        prefetch_to_write(line)
        prefetch_to_write(line + LINE_BYTES)
        result = _change(operation, row, words[g], given[items[g]])
        if result == NO_ROOM:
            return False
        results[items[g]] = result
        bounds[r, 0] = g + 1
    return True


@kernel
def change_keys(operation, rows, table_bits, words, items, bounds, pending, given, results):
    """Change grouped keys in the shards that ``pending`` lists; ``results`` are by item.

    The first of a row's ``bounds`` moves on with what is done. Rows not finished go to the front of
    ``pending``; returns their number and the row that made it stop: one without room, or one whose table has
    other shards by now than ``table_bits`` says. -1 if there is none: the rows left are locked by others.
    """
    num_pending, stopped, progress = len(pending), -1, True
    while num_pending > 0 and progress and stopped < 0:
        progress, num_left = False, 0
        for p in range(num_pending):
            r = pending[p]
            row = rows + ROW_BYTES * r
            if stopped < 0 and try_lock(row, _SPINS):
                progress = True
                if not _change_shard(
                    operation, row, rows, r, table_bits, words, items, bounds, given, results
                ):
                    stopped = r
                unlock(row, True)
                if stopped < 0:
                    continue
            pending[num_left] = r
            num_left += 1
        num_pending = num_left
    return num_pending, stopped
