"""Compiled loops over the rows of a plan whose records have been found: nothing is looked up here.

``at`` has the address of each row's record in one memory, 0 where there is none.
"""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import copy_bytes, memory_at, prefetch_to_read, prefetch_to_write, record_address

_VALUES, _STATE, _GRADIENT = 1, 2, 4  # `rowhaul.schedule.plan.Payload`
_OWN, _SHARED, _REPLICATED, _NOT_ADMITTED = range(4)  # roles of rows in training
_AHEAD = 8  # how far ahead of its use a record is asked for


@kernel
def pick_needed(tables, needed, bit, group_of, position_of, group, num_tables):
    """The rows of a group that a bit is set of, table by table, and where each table begins."""
    starts = np.zeros(num_tables + 1, np.int64)
    for r in range(len(tables)):
        if needed[r] & bit and group_of[tables[r]] == group:
            starts[position_of[tables[r]] + 1] += 1
    for position in range(num_tables):
        starts[position + 1] += starts[position]
    following = starts.copy()
    places = np.empty(starts[-1], np.int64)
    for r in range(len(tables)):
        if needed[r] & bit and group_of[tables[r]] == group:
            position = position_of[tables[r]]
            places[following[position]] = r
            following[position] += 1
    return places, starts


@kernel
def note_records(addresses, shift, record_bytes, places, locations, records, at):
    """Remember where the records of rows were found; those that were not stay as they are."""
    for i in range(len(places)):
        if locations[i] >= 0:
            records[places[i]] = locations[i]
            at[places[i]] = record_address(addresses, shift, record_bytes, locations[i])


@kernel
def mark_arrivals(kind, payload, row, is_chosen, needed, bit):
    """Set a bit of rows that records came for."""
    for i in range(len(kind)):
        if payload[i] & _VALUES and row[i] >= 0 and is_chosen[kind[i]]:
            needed[row[i]] |= bit


@kernel
def mark_absent(trainers, mask, states, records, needed, arrived, absent, fresh, not_admitted):
    """Set a bit of rows that are to be in the cache and are not yet; tells one that cannot come, or -1.

    Rows that came, and rows that nobody has trained before, can.
    """
    missing = -1
    for r in range(len(trainers)):
        if records[r] < 0 and (trainers[r] & mask or needed[r] & arrived):
            if needed[r] & arrived or states[r] == fresh:
                needed[r] |= absent
            elif states[r] != not_admitted:
                missing = r
    return missing


@kernel
def pack_rows(
    kind,
    payload,
    table,
    row,
    offsets,
    is_from_home,
    home_at,
    cache_at,
    value_bytes,
    record_bytes,
    out_address,
):
    """Copy records into the buffer of a turn; returns a payload whose record is not there, or -1."""
    last = len(kind) - 1
    for i in range(len(kind)):
        soon = min(i + _AHEAD, last)
        if row[soon] >= 0:
            prefetch_to_read(home_at[row[soon]] if is_from_home[kind[soon]] else cache_at[row[soon]])
        if payload[i] & _VALUES and row[i] >= 0:
            address = home_at[row[i]] if is_from_home[kind[i]] else cache_at[row[i]]
            if address == 0:
                return i
            size = record_bytes[table[i]] if payload[i] & _STATE else value_bytes[table[i]]
            copy_bytes(out_address + offsets[i], address, size)
    return -1


@kernel
def unpack_rows(kind, payload, table, row, offsets, is_chosen, at, value_bytes, record_bytes, in_address):
    """Overwrite records with those that came; returns a payload whose record is not there, or -1."""
    last = len(kind) - 1
    for i in range(len(kind)):
        soon = min(i + _AHEAD, last)
        if row[soon] >= 0:
            prefetch_to_write(at[row[soon]])
        if payload[i] & _VALUES and row[i] >= 0 and is_chosen[kind[i]]:
            address = at[row[i]]
            if address == 0:
                return i
            size = record_bytes[table[i]] if payload[i] & _STATE else value_bytes[table[i]]
            copy_bytes(address, in_address + offsets[i], size)
    return -1


@kernel
def note_gradients(
    kind, payload, table, row, source, offsets, is_chosen, step_of_row, contributors, value_bytes,
    record_bytes, in_address, done, gradients,
):  # fmt: skip
    """Where the gradients are that came for steps that are due: steps x workers; marks those as done."""
    for i in range(len(kind)):
        if payload[i] & _GRADIENT and row[i] >= 0 and is_chosen[kind[i]]:
            step = step_of_row[row[i]] - 1
            if step >= 0 and contributors[step] & (np.uint64(1) << np.uint64(source[i])):
                behind = 0
                if payload[i] & _VALUES:
                    behind = record_bytes[table[i]] if payload[i] & _STATE else value_bytes[table[i]]
                gradients[step, source[i]] = in_address + offsets[i] + behind
                done[i] = 1


@kernel
def rows_on_shelf(contributors, gradients, keys, starts, worker):
    """Of steps that come table by table, those whose gradient of a worker is not known yet."""
    mask = np.uint64(1) << np.uint64(worker)
    places, some, begins = np.empty_like(keys), np.empty_like(keys), np.empty_like(starts)
    count = 0
    for position in range(len(starts) - 1):
        begins[position] = count
        for i in range(starts[position], starts[position + 1]):
            if contributors[i] & mask and gradients[i, worker] == 0:
                places[count], some[count] = i, keys[i]
                count += 1
    begins[-1] = count
    return places[:count], some[:count], begins


@kernel
def note_shelved(addresses, shift, record_bytes, places, locations, worker, gradients):
    """Where the gradients are that were on a shelf."""
    for i in range(len(places)):
        gradients[places[i], worker] = record_address(addresses, shift, record_bytes, locations[i])


@kernel
def sum_gradients(gradients, sums):
    """Add up the gradients of each row in the order of the workers."""
    dim = sums.shape[1]
    for s in range(len(sums)):
        for k in range(dim):
            sums[s, k] = 0
        for worker in range(gradients.shape[1]):
            if gradients[s, worker] != 0:
                part = memory_at(gradients[s, worker], dim, sums.dtype)
                for k in range(dim):
                    sums[s, k] += part[k]


@kernel
def sort_by_role(
    tables, keys, trainers, states, worker, bounded, group_of, position_of, group, num_tables,
    replicated, not_admitted,
):  # fmt: skip
    """The rows of a group that a worker trains, by role, and table by table within each.

    Returns keys and positions of tables; where each role begins; of the admitted ones, table by table, their
    place among those, their place in the plan, and where each table begins; keys and starts of all replicated
    rows; and which of these the worker trains.
    """
    mask = np.uint64(1) << np.uint64(worker)
    roles = np.zeros(5, np.int64)
    starts, copy_starts = np.zeros(num_tables + 1, np.int64), np.zeros(num_tables + 1, np.int64)
    role_of = np.full(len(tables), -1, np.int8)
    for r in range(len(tables)):
        if group_of[tables[r]] != group:
            continue
        after = position_of[tables[r]] + 1
        if states[r] == replicated:
            copy_starts[after] += 1
        if trainers[r] & mask:
            if states[r] == replicated:
                role = _REPLICATED
            elif states[r] == not_admitted:
                role = _NOT_ADMITTED
            else:
                role = _OWN if bounded or trainers[r] == mask else _SHARED
            role_of[r] = role
            roles[role + 1] += 1
            if role != _NOT_ADMITTED:
                starts[after] += 1
    for role in range(4):
        roles[role + 1] += roles[role]
    for position in range(num_tables):
        starts[position + 1] += starts[position]
        copy_starts[position + 1] += copy_starts[position]
    following, copies_following, roles_following = starts.copy(), copy_starts.copy(), roles.copy()
    chosen, positions = np.empty(roles[4], np.int64), np.empty(roles[4], np.int64)
    planned, copy_of = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.int64)
    copied = np.empty(copy_starts[-1], np.int64)
    for r in range(len(tables)):
        role = role_of[r]
        if role < 0 and not (states[r] == replicated and group_of[tables[r]] == group):
            continue
        position = position_of[tables[r]]
        copy = -1
        if states[r] == replicated:
            copy = copies_following[position]
            copies_following[position] += 1
            copied[copy] = keys[r]
        if role == _NOT_ADMITTED:
            chosen[roles_following[role]], positions[roles_following[role]] = keys[r], position
            roles_following[role] += 1
        elif role >= 0:
            planned[following[position]], copy_of[following[position]] = r, copy
            following[position] += 1
    order, here = np.empty(len(planned), np.int64), np.empty(roles[3] - roles[2], np.int64)
    for position in range(num_tables):
        for k in range(starts[position], starts[position + 1]):
            role = role_of[planned[k]]
            place = roles_following[role]
            roles_following[role] += 1
            order[k] = place
            chosen[place], positions[place] = keys[planned[k]], position
            if role == _REPLICATED:
                here[place - roles[2]] = copy_of[k]
    return chosen, positions, roles, order, planned, starts, copied, copy_starts, here
