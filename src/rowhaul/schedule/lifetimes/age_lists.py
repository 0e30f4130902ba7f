"""Compiled loops over the rows of tables that forget: lists from the one named longest ago to the newest.

A row has an entry. The entries of a table form two doubly linked lists, of rows that wait for admission and
of rows that are known, each ordered by (last use, key): the rows of a batch come in order of their keys
and go to the end. So whatever is to be forgotten for its age is found at the beginning of a list.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_write
from rowhaul.schedule.directory.index_kernels import index_delete, index_find, index_set
from rowhaul.schedule.id_kernels import row_hash
from rowhaul.schedule.lifetimes.status import Status

WAITING, ADMITTED, KNOWN = np.uint8(Status.WAITING), np.uint8(Status.ADMITTED), np.uint8(Status.KNOWN)
MOST_SIGHTINGS = 1 << 30  # beyond, rows are not told apart by how often they were named
NOT_YET = -1  # when a row that waits was admitted
NONE = -1  # no entry
_AHEAD = 16  # how many rows ahead of their use scattered memory is asked for
_FIRST, _LAST = 0, 1


@register_jitable
def _append(entries, ends, sizes, number):
    """Put an entry at the end of the list that it belongs to."""
    entry = entries[number]
    which = 1 if entry.born != NOT_YET else 0
    last = ends[entry.table, which, _LAST]
    entry.previous = last
    entry.next = NONE
    if last == NONE:
        ends[entry.table, which, _FIRST] = number
    else:
        entries[last].next = number
    ends[entry.table, which, _LAST] = number
    sizes[entry.table, which] += 1


@register_jitable
def _take_out(entries, ends, sizes, number):
    """Take an entry out of its list."""
    entry = entries[number]
    which = 1 if entry.born != NOT_YET else 0
    if entry.previous == NONE:
        ends[entry.table, which, _FIRST] = entry.next
    else:
        entries[entry.previous].next = entry.next
    if entry.next == NONE:
        ends[entry.table, which, _LAST] = entry.previous
    else:
        entries[entry.next].previous = entry.previous
    sizes[entry.table, which] -= 1


@kernel
def touch(
    iteration, tables, keys, occurrences, numbers, places, entries, free, num_free, ends, sizes, admit_after
):
    """Note that a batch names rows, ordered by (table, key), and say what becomes of each.

    ``numbers`` are their entries; those that have none get one. Returns a `Status` each, and the free
    entries left.
    """
    status = np.empty(len(keys), np.uint8)
    address = np.int64(entries.ctypes.data)
    for r in range(len(keys)):
        if r + _AHEAD < len(keys) and numbers[r + _AHEAD] >= 0:
            prefetch_to_write(address + np.int64(numbers[r + _AHEAD]) * entries.itemsize)
        if numbers[r] >= 0:
            _take_out(entries, ends, sizes, numbers[r])
        else:
            num_free -= 1
            numbers[r] = free[num_free]
            index_set(places, index_find(places, tables[r], keys[r]), tables[r], keys[r], numbers[r])
            new = entries[numbers[r]]
            new.key = keys[r]
            new.table = tables[r]
            new.count = 0
            new.born = NOT_YET
        entry = entries[numbers[r]]
        entry.last = iteration
        entry.count = min(np.int64(entry.count) + occurrences[r], MOST_SIGHTINGS)
        if entry.born != NOT_YET:
            status[r] = KNOWN
        elif entry.count >= min(admit_after[tables[r]], MOST_SIGHTINGS):
            entry.born = iteration
            status[r] = ADMITTED
        else:
            status[r] = WAITING
        _append(entries, ends, sizes, numbers[r])
    return status, num_free


@kernel
def due(iteration, entries, ends, ttl, which):
    """The entries that were not named for as long as their table keeps them, table by table, oldest first."""
    count = 0
    for table in range(len(ttl)):
        number = ends[table, which, _FIRST] if ttl[table] > 0 else NONE
        while number != NONE and iteration - entries[number].last >= ttl[table]:
            count += 1
            number = entries[number].next
    found = np.empty(count, np.int32)
    count = 0
    for table in range(len(ttl)):
        number = ends[table, which, _FIRST] if ttl[table] > 0 else NONE
        while number != NONE and iteration - entries[number].last >= ttl[table]:
            found[count] = number
            count += 1
            number = entries[number].next
    return found


@kernel
def oldest(entries, ends, excess):
    """So many known rows of each table, those named longest ago."""
    found = np.empty(excess.sum(), np.int32)
    count = 0
    for table in range(len(excess)):
        number = ends[table, 1, _FIRST]
        for _ in range(excess[table]):
            found[count] = number
            count += 1
            number = entries[number].next
    return found


@kernel
def remove(numbers, places, entries, free, num_free, ends, sizes):
    """Forget entries; returns their tables and keys, and the free entries left."""
    tables = np.empty(len(numbers), np.int32)
    keys = np.empty(len(numbers), np.int64)
    mask = np.int64(len(places) - 1)
    address = np.int64(places.ctypes.data)
    for i in range(len(numbers)):
        entry = entries[numbers[i]]
        tables[i] = entry.table
        keys[i] = entry.key
        prefetch_to_write(address + (np.int64(row_hash(entry.table, entry.key)) & mask) * 16)
    for i in range(len(numbers)):
        _take_out(entries, ends, sizes, numbers[i])
        entries[numbers[i]].born = NOT_YET  # a heap may still have it
        index_delete(places, index_find(places, tables[i], keys[i]))
        free[num_free] = numbers[i]
        num_free += 1
    return tables, keys, num_free


@kernel
def append_all(numbers, entries, ends, sizes):
    """Put entries, in order, at the ends of their lists."""
    for number in numbers:
        _append(entries, ends, sizes, number)


@kernel
def listed(entries, ends, total):
    """All entries that are in a list."""
    found = np.empty(total, np.int32)
    count = 0
    for table in range(len(ends)):
        for which in range(2):
            number = ends[table, which, _FIRST]
            while number != NONE:
                found[count] = number
                count += 1
                number = entries[number].next
    return found
