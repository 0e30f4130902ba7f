"""Compiled loops that put row states into a dispatcher's terms."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_read
from rowhaul.schedule.directory.codes import HOME, NOT_ADMITTED, OWNED, REPLICATED, SPLIT
from rowhaul.schedule.directory.slot_kernels import AHEAD
from rowhaul.schedule.id_kernels import home_shard
from rowhaul.schedule.masks import NOBODY, ONE, bit, lowest


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
