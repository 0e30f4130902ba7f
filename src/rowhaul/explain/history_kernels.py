"""Compiled loops that find out why rows move, from a plan and from what happened to its rows before.

What happened before is in a hash table: a row has a place in one of two buckets, which fit a line of the
processor's cache each. When all of these places are taken, the row used least recently is forgotten.
"""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_write
from rowhaul.explain.reasons import Reason
from rowhaul.schedule.masks import NOBODY, ONE, bit
from rowhaul.schedule.plan import Kind, Payload
from rowhaul.schedule.row_states import HOME, NOT_ADMITTED, OWNED, REPLICATED, SPLIT
from rowhaul.schedule.topology import row_hash

BUCKET = 8  # places
_FREE, _LEFT = np.uint64(0), np.uint64(1)  # names of places: never taken; its row has been forgotten
DISTANCES = 48  # powers of two of evictions between losing a row and needing it again
_AHEAD = 8

ENTRY = np.dtype(
    [
        ("held", np.uint64),  # workers that have ever held the row
        ("trained", np.uint64),  # workers that trained it last; nobody: it was replicated
        ("evicted", np.uint64),  # workers that lost it to evictions since
        ("moved_bytes", np.int64),
        ("evicted_at", np.int64),  # evictions of that worker before the latest one of this row
        ("evicted_bytes", np.int32),  # that the latest eviction pushed
        ("table", np.int32),  # negative: there is no row
        ("iterations", np.int32),  # in which the row was trained
        ("touched", np.int32),  # the last of them
    ],
    align=True,
)

_MISS_PULL, _EVICT_PUSH = np.uint8(Kind.MISS_PULL), np.uint8(Kind.EVICT_PUSH)
_GRADIENT = np.uint8(Payload.GRADIENT)
_FIRST_USE, _TRAINED_ELSEWHERE, _EVICTED = (
    np.int64(one) for one in (Reason.FIRST_USE, Reason.TRAINED_ELSEWHERE, Reason.EVICTED)
)
_SPLIT, _SYNC, _HOT = (np.int64(one) for one in (Reason.SPLIT, Reason.SYNC, Reason.HOT))


@kernel
def name_of(table, key):
    """Return the name of a row: a hash that no two rows can be expected to share."""
    name = row_hash(table, key)
    return name if name > _LEFT else name + np.uint64(2)


@kernel
def bucket_of(names, name, which):
    """Return the first place of one of the two buckets of a row."""
    mask = np.uint64(len(names) // BUCKET - 1)
    return np.int64((name >> np.uint64(40 * which)) & mask) * BUCKET


@kernel
def find(names, name):
    """Return the place of a row, or -1."""
    for which in range(2):
        first = bucket_of(names, name, which)
        for place in range(first, first + BUCKET):
            if names[place] == name:
                return place
            if names[place] == _FREE:
                return np.int64(-1)  # places of a bucket are taken in order
    return np.int64(-1)


@kernel
def take(names, entries, name, table):
    """Return the place of a row, and 0: it was there; 1: it took a free one; 2: it took another row's."""
    place = find(names, name)
    if place >= 0:
        return place, 0
    outcome = 2
    place = bucket_of(names, name, 0)
    for which in range(2):
        first = bucket_of(names, name, which)
        for other in range(first, first + BUCKET):
            if names[other] <= _LEFT:
                place, outcome = other, 1
                break
            if entries[other].touched < entries[place].touched:
                place = other
        if outcome == 1:
            break
    names[place] = name
    entry = entries[place]
    entry.table = table
    entry.held = NOBODY
    entry.trained = NOBODY
    entry.evicted = NOBODY
    entry.moved_bytes = 0
    entry.evicted_at = 0
    entry.evicted_bytes = 0
    entry.iterations = 0
    entry.touched = 0
    return place, outcome


@kernel
def rehash(names, entries, new_names, new_entries):
    """Copy all entries into a larger table; returns how many there was room for."""
    count = 0
    for at in range(len(names)):
        if names[at] > _LEFT:
            place, outcome = take(new_names, new_entries, names[at], entries[at].table)
            new_entries[place] = entries[at]
            count += outcome == 1
    return count


@kernel
def why_pulled(entry, worker):
    """Why a worker pulls a row that is at home."""
    mask = bit(worker)
    if entry.held & mask == NOBODY:
        return _FIRST_USE
    if entry.trained == NOBODY:
        return _HOT
    if entry.trained & mask == NOBODY:
        return _TRAINED_ELSEWHERE  # also if a copy out of date was evicted
    if entry.trained & (entry.trained - ONE) != NOBODY:
        return _SPLIT  # also if it was evicted since: the copy was out of date once it was trained
    return _EVICTED if entry.evicted & mask != NOBODY else _SYNC


@kernel
def count_plan(
    names, entries, iteration, states, trainers, tables, keys, kind, payload, move_table, move_key, source,
    target, num_bytes, after, move_rows, evicted_from, evicted_tables, evicted_keys, forgotten_tables,
    forgotten_keys, table_of, num_ranks, num_evictions, by_link, by_table, of_link_and_table, repulled,
):  # fmt: skip
    """Count the moves of a plan by reason; then remember who trained, evicted and forgot which rows.

    ``by_link`` is links x kinds x reasons x (rows, bytes), ``by_table`` the same of tables, and ``repulled``
    distances x (rows, bytes): evicted rows that came back, and what that and their eviction moved.
    Returns how many more rows are remembered, and how many were forgotten for new ones.
    """
    more, forgotten = 0, 0
    places = np.empty(len(keys), np.int64)
    row_names = np.empty(len(keys), np.uint64)
    names_address, entries_address = np.int64(names.ctypes.data), np.int64(entries.ctypes.data)
    for r in range(len(keys)):
        row_names[r] = name_of(tables[r], keys[r])
    for r in range(len(keys)):
        if r + _AHEAD < len(keys):
            soon = bucket_of(names, row_names[r + _AHEAD], 0)
            prefetch_to_write(names_address + soon * 8)
        places[r], outcome = take(names, entries, row_names[r], tables[r])
        if outcome == 2:
            forgotten += 1
            entries[places[r]].touched = iteration  # rows of this batch are not forgotten for each other
        more += outcome == 1
    for m in range(len(kind)):
        row = move_rows[m] if len(move_rows) else np.int32(-1)
        place = places[row] if row >= 0 else find(names, name_of(move_table[m], move_key[m]))
        if row >= 0 and names[place] != row_names[row]:
            place = np.int64(-1)  # forgotten for another row of the batch
        state = states[row] if row >= 0 else HOME
        if kind[m] == _EVICT_PUSH:
            # A plan without numbers of rows is of bounded staleness, where no row is split.
            reason = _SPLIT if payload[m] & _GRADIENT and len(move_rows) else _EVICTED
        elif after[m]:
            reason = _SYNC
        elif state == SPLIT:
            reason = _SPLIT
        elif state == OWNED:
            reason = _TRAINED_ELSEWHERE
        elif kind[m] == _MISS_PULL:
            reason = why_pulled(entries[place], target[m]) if place >= 0 else _FIRST_USE
        else:
            reason = _SYNC
        size = num_bytes[m]
        link = np.int64(source[m]) * num_ranks + target[m]
        table = table_of[move_table[m]]
        by_link[link, kind[m], reason, 0] += 1
        by_link[link, kind[m], reason, 1] += size
        by_table[table, kind[m], reason, 0] += 1
        by_table[table, kind[m], reason, 1] += size
        of_link_and_table[link, table] += size
        if place < 0:
            continue
        entry = entries[place]
        entry.moved_bytes += size
        if kind[m] == _EVICT_PUSH:
            if entry.trained & bit(source[m]) != NOBODY:
                entry.evicted_bytes = size
        elif reason == _EVICTED:
            distance = num_evictions[target[m]] - entry.evicted_at
            step = 0
            while distance > 1 and step < DISTANCES - 1:
                distance = (distance + 1) >> 1
                step += 1
            repulled[step, 0] += 1
            repulled[step, 1] += size + entry.evicted_bytes
    for e in range(len(evicted_keys)):
        worker = evicted_from[e]
        place = find(names, name_of(evicted_tables[e], evicted_keys[e]))
        if place >= 0 and entries[place].trained & bit(worker) != NOBODY:  # other copies are out of date
            entries[place].evicted |= bit(worker)
            entries[place].evicted_at = num_evictions[worker]
        num_evictions[worker] += 1
    for r in range(len(keys)):
        if r + _AHEAD < len(keys):
            prefetch_to_write(entries_address + places[r + _AHEAD] * entries.itemsize)
        if names[places[r]] != row_names[r]:
            continue  # forgotten for another row of the batch
        entry = entries[places[r]]
        entry.touched = iteration
        if states[r] == NOT_ADMITTED:
            continue
        entry.held |= trainers[r]
        entry.trained = NOBODY if states[r] == REPLICATED else trainers[r]
        entry.evicted = NOBODY
        entry.evicted_bytes = 0
        entry.iterations += 1
    for f in range(len(forgotten_keys)):
        place = find(names, name_of(forgotten_tables[f], forgotten_keys[f]))
        if place >= 0:
            names[place] = _LEFT
            entries[place].table = -1
            more -= 1
    return more, forgotten
