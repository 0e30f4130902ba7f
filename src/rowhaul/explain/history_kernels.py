"""Compiled loops that find out why rows move, from a plan and from what happened to its rows before.

What happened before is in a hash table of entries: a row is in one of the `WINDOW` places after its hash.
When all of them are taken, the row used least recently is forgotten.
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

WINDOW = 24
_FREE, _LEFT = np.int32(-1), np.int32(-2)  # never taken; its row has been forgotten
DISTANCES = 48  # powers of two of evictions between losing a row and needing it again
_AHEAD = 8

ENTRY = np.dtype(
    [
        ("key", np.int64),
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
def find(entries, table, key):
    """Return the place of a row, or -1."""
    mask = np.int64(len(entries) - 1)
    first = np.int64(row_hash(table, key)) & mask
    for step in range(WINDOW):
        place = (first + step) & mask
        if entries[place].key == key and entries[place].table == table:
            return place
        if entries[place].table == _FREE:
            break
    return np.int64(-1)


@kernel
def take(entries, table, key):
    """Return the place of a row, and 0: it was there; 1: it took a free one; 2: it took another row's."""
    place = find(entries, table, key)
    if place >= 0:
        return place, 0
    mask = np.int64(len(entries) - 1)
    first = np.int64(row_hash(table, key)) & mask
    place, outcome = first, 2
    for step in range(WINDOW):
        other = (first + step) & mask
        if entries[other].table < 0:
            place, outcome = other, 1
            break
        if entries[other].touched < entries[place].touched:
            place = other
    entry = entries[place]
    entry.key = key
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
def rehash(old, new):
    """Copy all entries into a larger table; returns how many there was room for."""
    count = 0
    for at in range(len(old)):
        if old[at].table >= 0:
            place, outcome = take(new, old[at].table, old[at].key)
            new[place] = old[at]
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
def count_moves(
    entries, states, tables, keys, kind, payload, move_table, move_key, source, target, num_bytes, after,
    move_rows, table_of, num_ranks, num_evictions, by_link, by_table, of_link_and_table, repulled,
):  # fmt: skip
    """Count the moves of a plan by reason; call it before `note_training`.

    ``by_link`` is links x kinds x reasons x (rows, bytes), ``by_table`` the same of tables, and ``repulled``
    distances x (rows, bytes): evicted rows that came back, and what that and their eviction moved.
    Returns how many rows were new, and how many were forgotten for them.
    """
    address = np.int64(entries.ctypes.data)
    new, forgotten = 0, 0
    places = np.empty(len(keys), np.int64)
    mask = np.int64(len(entries) - 1)
    for r in range(len(keys)):
        if r + _AHEAD < len(keys):
            soon = np.int64(row_hash(tables[r + _AHEAD], keys[r + _AHEAD])) & mask
            prefetch_to_write(address + soon * entries.itemsize)
        places[r], outcome = take(entries, tables[r], keys[r])
        entries[places[r]].touched = np.int32(0x7FFFFFFF)  # in use
        new += outcome == 1
        forgotten += outcome == 2
    for m in range(len(kind)):
        row = move_rows[m] if len(move_rows) else np.int32(-1)
        place = places[row] if row >= 0 else find(entries, move_table[m], move_key[m])
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
    return new, forgotten


@kernel
def note_training(
    entries, iteration, states, trainers, tables, keys, evicted_from, evicted_tables, evicted_keys,
    forgotten_tables, forgotten_keys, num_evictions,
):  # fmt: skip
    """Remember who trained, evicted and forgot which rows in an iteration."""
    for e in range(len(evicted_keys)):
        worker = evicted_from[e]
        place = find(entries, evicted_tables[e], evicted_keys[e])
        if place >= 0 and entries[place].trained & bit(worker) != NOBODY:  # other copies are out of date
            entries[place].evicted |= bit(worker)
            entries[place].evicted_at = num_evictions[worker]
        num_evictions[worker] += 1
    for r in range(len(keys)):
        place = find(entries, tables[r], keys[r])
        if place < 0:
            continue  # forgotten for another row of the batch
        entry = entries[place]
        entry.touched = iteration
        if states[r] == NOT_ADMITTED:
            continue
        entry.held |= trainers[r]
        entry.trained = NOBODY if states[r] == REPLICATED else trainers[r]
        entry.evicted = NOBODY
        entry.evicted_bytes = 0
        entry.iterations += 1
    for f in range(len(forgotten_keys)):
        place = find(entries, forgotten_tables[f], forgotten_keys[f])
        if place >= 0:
            entries[place].table = _LEFT
