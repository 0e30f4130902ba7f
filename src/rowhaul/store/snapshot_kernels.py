"""Compiled loops of a snapshot: who copies a record first, the thread that writes the snapshot or training.

Every record has a state, a 32-bit number that only atomic exchanges change:

* ``PENDING``: in the snapshot, and unchanged since;
* ``slot + 1``: training was about to change it and has copied it to this slot first;
* ``GONE``: taken, or never in the snapshot.

A thread that wants to leave ``PENDING`` first copies the record, then exchanges the state. Training changes a
record only after that, so a copy whose exchange succeeds is a copy of the unchanged record. No thread ever
waits for another one.
"""

from __future__ import annotations

from numba import int32

from rowhaul._atomic import compare_exchange32, load_acquire32
from rowhaul._kernels import kernel
from rowhaul._memory import copy_bytes, data_address, record_address

PENDING, GONE = 0, -1


@kernel
def count_pending(states, records):
    """Count the records whose state is still ``PENDING``."""
    count = 0
    for i in range(len(records)):
        if 0 <= records[i] < len(states):
            count += states[records[i]] == PENDING
    return count


@kernel
def keep_changing(states, addresses, shift, record_bytes, records, slots, slot_addresses, slot_shift):
    """Copy pending records, which differ, to slots; returns how many slots are used."""
    base, used = data_address(states), 0
    for i in range(len(records)):
        record = records[i]
        if record < 0 or record >= len(states) or states[record] != PENDING or used == len(slots):
            continue
        source = record_address(addresses, shift, record_bytes, record)
        copy_bytes(
            record_address(slot_addresses, slot_shift, record_bytes, slots[used]), source, record_bytes
        )
        used += compare_exchange32(base + 4 * record, int32(PENDING), int32(slots[used] + 1))
    return used


@kernel
def keep_removed(states, addresses, shift, record_bytes, records, slots, slot_addresses, slot_shift, kept):
    """The same for records whose keys are gone; ``kept`` gets the slot of each one, -1 for none."""
    base, used = data_address(states), 0
    for i in range(len(records)):
        record = records[i]
        kept[i] = -1
        if record < 0 or record >= len(states):
            continue
        if states[record] == PENDING and used < len(slots):
            source = record_address(addresses, shift, record_bytes, record)
            copy_bytes(
                record_address(slot_addresses, slot_shift, record_bytes, slots[used]), source, record_bytes
            )
            if compare_exchange32(base + 4 * record, int32(PENDING), int32(GONE)):
                kept[i] = slots[used]
                used += 1
        else:
            state = load_acquire32(base + 4 * record)
            if state > PENDING and compare_exchange32(base + 4 * record, state, int32(GONE)):
                kept[i] = state - 1
    return used


@kernel
def take_records(
    states, marks, mark, addresses, shift, record_bytes, records, out_address, taken, kept, slots
):
    """Take records with this mark (0: without one) out of the snapshot, each once.

    ``taken`` gets the places of unchanged records, in the order in which they are copied to an address;
    ``kept`` the places of changed ones, and ``slots`` where their copies are. Returns both counts.
    """
    base, num_taken, num_kept = data_address(states), 0, 0
    for i in range(len(records)):
        record = records[i]
        if record < 0 or record >= len(states) or (marks[record] if len(marks) > 0 else 0) != mark:
            continue
        if states[record] == PENDING:
            source = record_address(addresses, shift, record_bytes, record)
            copy_bytes(out_address + num_taken * record_bytes, source, record_bytes)
            if compare_exchange32(base + 4 * record, int32(PENDING), int32(GONE)):
                taken[num_taken] = i
                num_taken += 1
                continue
        state = load_acquire32(base + 4 * record)
        if state > PENDING and compare_exchange32(base + 4 * record, state, int32(GONE)):
            kept[num_kept] = i
            slots[num_kept] = state - 1
            num_kept += 1
    return num_taken, num_kept
