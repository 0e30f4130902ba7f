"""Compiled loops of bounded staleness: before training, evictions, and after training."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul.schedule.directory.codes import FRESH, HOME, NOT_ADMITTED, REPLICATED
from rowhaul.schedule.directory.index_kernels import index_delete, index_find, index_set, index_value
from rowhaul.schedule.id_kernels import home_shard
from rowhaul.schedule.masks import NOBODY, ONE, bit, lowest
from rowhaul.schedule.sync.move_kernels import (
    AFTER,
    BEFORE,
    EVICT_PUSH,
    FIRST,
    GRADIENT,
    MISS_PULL,
    RECORD,
    SECOND,
    UPDATE_PUSH,
    emit,
)


@kernel
def copy_of(index, worker, slot):
    """The number of a worker's copy."""
    return index_value(index[index_find(index, worker, slot), 1])


@kernel
def count_fresh_enough(record, slot, index, seen, versions, staleness):
    """Set a record's members: the copies that the home is not too far ahead of."""
    record.members = NOBODY
    rest = record.base
    while rest != NOBODY:
        w = lowest(rest)
        if versions[slot] - seen[copy_of(index, w, slot)] <= staleness:
            record.members |= bit(w)
        rest &= rest - ONE


@kernel
def refresh(
    slots, batch_slots, trainers, index, seen, pending, free, num_free, versions,
    value_bytes, state_bytes, first_store, num_shards, iteration, look_ahead, moves, lookups, hits, states,
):  # fmt: skip
    """Before training: copies too far behind hand in what waits and are pulled again."""
    count = 0
    replicated_rows = 0
    replicated_bytes = np.int64(0)
    for r in range(len(batch_slots)):
        slot = batch_slots[r]
        record = slots[slot]
        by = trainers[r]
        states[r] = record.state
        rest = by
        while rest != NOBODY:
            w = lowest(rest)
            lookups[w] += 1
            if record.state == REPLICATED or (record.state == HOME and record.members & bit(w) != NOBODY):
                hits[w] += 1
            rest &= rest - ONE
        values, state = value_bytes[record.table], state_bytes[record.table]
        if record.state == REPLICATED:
            replicated_rows += 1
            replicated_bytes += values
        if record.state == REPLICATED or record.state == NOT_ADMITTED:
            continue
        if record.base == NOBODY:
            versions[slot] = 0  # nobody remembers another one
        home = first_store + home_shard(record.table, record.key, num_shards)
        ready = min(iteration, max(record.touched + 1, iteration - look_ahead, 0))
        phase = FIRST
        rest = by & record.base & ~record.members
        while rest != NOBODY:
            w = lowest(rest)
            copy = copy_of(index, w, slot)
            if pending[copy] > 0:
                count = emit(moves, count, UPDATE_PUSH, GRADIENT, record, w, home, values, iteration)
                versions[slot] += pending[copy]
                pending[copy] = 0
                ready, phase = iteration, SECOND  # what is pulled has this update in it
            rest &= rest - ONE
        rest = by & ~record.members
        while rest != NOBODY:
            w = lowest(rest)
            if record.state != FRESH:
                count = emit(
                    moves, count, MISS_PULL, RECORD, record, home, w, values + state, ready, BEFORE, phase
                )
            place = index_find(index, w, slot)
            if index[place, 1] == 0:
                num_free -= 1
                index_set(index, place, w, slot, free[num_free])
                pending[free[num_free]] = 0
            seen[index_value(index[place, 1])] = versions[slot]
            rest &= rest - ONE
        record.base |= by
        record.state = HOME
        record.touched = iteration
    return count, replicated_rows, replicated_bytes, num_free


@kernel
def drop(
    slots, evicted_from, victims, index, seen, pending, free, num_free, versions, staleness,
    value_bytes, first_store, num_shards, iteration, moves, count,
):  # fmt: skip
    """Evictions: a copy hands in what waits in it before it goes."""
    for e in range(len(victims)):
        slot, w = victims[e], evicted_from[e]
        record = slots[slot]
        record.touched = iteration
        place = index_find(index, w, slot)
        copy = index_value(index[place, 1])
        if pending[copy] > 0:
            home = first_store + home_shard(record.table, record.key, num_shards)
            count = emit(
                moves, count, EVICT_PUSH, GRADIENT, record, w, home, value_bytes[record.table], iteration
            )
            versions[slot] += pending[copy]
        index_delete(index, place)
        free[num_free] = copy
        num_free += 1
        record.base &= ~bit(w)
        count_fresh_enough(record, slot, index, seen, versions, staleness)
    return count, num_free


@kernel
def forget(worker, slots, index, free, num_free):
    """Give up a worker's copies of rows, and what waits in them; returns the free copies."""
    for slot in slots:
        place = index_find(index, worker, slot)
        if index[place, 1] != 0:
            free[num_free] = index_value(index[place, 1])
            num_free += 1
            index_delete(index, place)
    return num_free


@kernel
def hand_in(
    slots, batch_slots, trainers, index, seen, pending, versions, staleness,
    value_bytes, first_store, num_shards, iteration, moves, count,
):  # fmt: skip
    """After training: every trainer has one more update; those with too many push them."""
    for r in range(len(batch_slots)):
        slot = batch_slots[r]
        record = slots[slot]
        if record.state == REPLICATED or record.state == NOT_ADMITTED:
            continue
        home = first_store + home_shard(record.table, record.key, num_shards)
        rest = trainers[r]
        while rest != NOBODY:
            w = lowest(rest)
            copy = copy_of(index, w, slot)
            pending[copy] += 1
            if pending[copy] > staleness:
                values = value_bytes[record.table]
                count = emit(moves, count, UPDATE_PUSH, GRADIENT, record, w, home, values, iteration, AFTER)
                versions[slot] += pending[copy]
                seen[copy] += pending[copy]
                pending[copy] = 0
            rest &= rest - ONE
        count_fresh_enough(record, slot, index, seen, versions, staleness)
    return count
