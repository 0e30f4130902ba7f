"""Compiled loops over the changes of a served model: open addressing from keys to places of records.

Slots are pairs of 8-byte numbers, a key and a place: 0, the slot is free; -1, the key was deleted; else the
address of its record.
"""

from __future__ import annotations

from numba import int64, uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import copy_bytes, data_address, load64, prefetch_to_read
from rowhaul.store.records import mix

FREE, DELETED = 0, -1


@register_jitable
def _first_slot(key, seed, mask):
    return int64(mix(uint64(key) ^ uint64(seed)) & uint64(mask))


@kernel
def put_places(slots, seed, keys, places):
    """Set the places of keys; returns how many slots that took."""
    mask, taken = len(slots) - 1, 0
    for i in range(len(keys)):
        slot = _first_slot(keys[i], seed, mask)
        while slots[slot, 1] != FREE and slots[slot, 0] != keys[i]:
            slot = (slot + 1) & mask
        taken += slots[slot, 1] == FREE
        slots[slot, 0] = keys[i]
        slots[slot, 1] = places[i]
    return taken


@kernel
def copy_slots(slots, seed, old):
    """Put everything of a smaller table into an empty one."""
    mask = len(slots) - 1
    for i in range(len(old)):
        if old[i, 1] == FREE:
            continue
        slot = _first_slot(old[i, 0], seed, mask)
        while slots[slot, 1] != FREE:
            slot = (slot + 1) & mask
        slots[slot, 0] = old[i, 0]
        slots[slot, 1] = old[i, 1]


@kernel
def find_places(slots, seed, keys, places):
    """Find the places of keys; `FREE` where they have none."""
    mask = len(slots) - 1
    for i in range(len(keys)):
        slot = _first_slot(keys[i], seed, mask)
        while slots[slot, 1] != FREE and slots[slot, 0] != keys[i]:
            slot = (slot + 1) & mask
        places[i] = slots[slot, 1]


@kernel
def locate_changed(tables, seed, feature_tables, id_starts, ids, found, num_unknown):
    """Correct what `locate_rows` has found where an id's row was changed or deleted since.

    ``tables`` has the address of each table's slots and one less than their number; -1 where nothing changed.
    """
    for feature in range(len(feature_tables)):
        slots_at, mask = tables[feature_tables[feature], 0], tables[feature_tables[feature], 1]
        if mask < 0:
            continue
        begin, end = id_starts[feature], id_starts[feature + 1]
        for i in range(begin, end):
            prefetch_to_read(slots_at + 16 * _first_slot(ids[i], seed, mask))
        for i in range(begin, end):
            slot = _first_slot(ids[i], seed, mask)
            while True:
                key = int64(load64(uint64(slots_at + 16 * slot)))
                place = int64(load64(uint64(slots_at + 16 * slot + 8)))
                if place == FREE or key == ids[i]:
                    break
                slot = (slot + 1) & mask
            if place == FREE:
                continue
            num_unknown[feature] += int64(place == DELETED) - int64(found[i] == 0)
            found[i] = 0 if place == DELETED else place
            if found[i]:
                prefetch_to_read(found[i])


@kernel
def gather_records(places, record_bytes, out):
    """Copy records of one size, given by address, one after the other."""
    target = data_address(out)
    for i in range(len(places)):
        copy_bytes(target + i * record_bytes, places[i], record_bytes)
