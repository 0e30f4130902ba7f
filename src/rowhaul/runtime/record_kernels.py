"""Compiled loops over numbered rows whose records have been located.

``at`` has the address of each row's record in one memory, 0 where there is none.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import copy_bytes, memory_at, prefetch_to_read, prefetch_to_write, record_address

_VALUES, _STATE, _GRADIENT = 1, 2, 4  # `rowhaul.schedule.plan.Payload`
_OWN, _SHARED, _REPLICATED, _NOT_ADMITTED, _OTHERS = range(5)  # roles of rows in training
_AHEAD = 8  # how far ahead of its use a record is asked for


@register_jitable
def _table_by_table(places, count, tables, position_of, starts):
    """Sort chosen rows by table; ``starts``, zeros at first, gets where each table begins.

    The rows of a plan are ordered by table, so nothing is left to do in most cases.
    """
    in_order, last = True, 0
    for i in range(count):
        position = position_of[tables[places[i]]]
        starts[position + 1] += 1
        in_order &= position >= last
        last = position
    for position in range(len(starts) - 1):
        starts[position + 1] += starts[position]
    if in_order:
        return places[:count]
    following, sorted_places = starts.copy(), np.empty(count, np.int64)
    for i in range(count):
        position = position_of[tables[places[i]]]
        sorted_places[following[position]] = places[i]
        following[position] += 1
    return sorted_places


@kernel
def pick_needed(tables, keys, needed, bit, group_of, position_of, group, num_tables):
    """Pick the rows of a group that have a bit set, table by table: places, keys, starts of tables."""
    starts = np.zeros(num_tables + 1, np.int64)
    places = np.empty(len(tables) + 1, np.int64)
    count = 0
    for r in range(len(tables)):
        places[count] = r  # branch-free, here and below, as no guess would hold
        count += (needed[r] & bit != 0) & (group_of[tables[r]] == group)
    places = _table_by_table(places, count, tables, position_of, starts)
    chosen = np.empty(count, np.int64)
    for i in range(count):
        chosen[i] = keys[places[i]]
    return places, chosen, starts


@kernel
def note_records(addresses, shift, record_bytes, places, locations, records, at):
    """Write down the locations and addresses of the records that were found."""
    for i in range(len(places)):
        if locations[i] >= 0:
            records[places[i]] = locations[i]
            at[places[i]] = record_address(addresses, shift, record_bytes, locations[i])


@kernel
def mark_arrivals(kind, payload, row, is_chosen, needed, bit):
    """Set a bit of rows whose records have arrived."""
    for i in range(len(kind)):
        if payload[i] & _VALUES and is_chosen[kind[i]]:
            needed[row[i]] |= bit


@kernel
def mark_absent(trainers, states, mask, records, needed, arrived, absent, fresh, replicated, not_admitted):
    """Set a bit of rows to insert into the cache; return one that is missing, or -1.

    Records that have arrived and rows never trained before are inserted. Others that the worker trains, or
    holds as replicas, must be in the cache.
    """
    missing = -1
    for r in range(len(records)):
        came = needed[r] & arrived != 0
        trained = r < len(trainers) and (trainers[r] & mask != 0 or states[r] == replicated)
        if records[r] < 0 and (came or trained):
            if came or states[r] == fresh:
                needed[r] |= absent
            elif states[r] != not_admitted:
                missing = r
    return missing


@kernel
def pack_records(kind, payload, row, offsets, is_chosen, at, tables, value_bytes, record_bytes, out_address):
    """Copy records into the buffer of a phase; return a payload whose record is missing, or -1."""
    last = len(kind) - 1
    for i in range(len(kind)):
        prefetch_to_read(at[row[min(i + _AHEAD, last)]])
        if payload[i] & _VALUES and is_chosen[kind[i]]:
            address = at[row[i]]
            if address == 0:
                return i
            table = tables[row[i]]
            size = record_bytes[table] if payload[i] & _STATE else value_bytes[table]
            copy_bytes(out_address + offsets[i], address, size)
    return -1


@kernel
def unpack_records(kind, payload, row, offsets, is_chosen, at, tables, value_bytes, record_bytes, in_address):
    """Overwrite records with those received; return a payload whose record is missing, or -1."""
    last = len(kind) - 1
    for i in range(len(kind)):
        prefetch_to_write(at[row[min(i + _AHEAD, last)]])
        if payload[i] & _VALUES and is_chosen[kind[i]]:
            address = at[row[i]]
            if address == 0:
                return i
            table = tables[row[i]]
            size = record_bytes[table] if payload[i] & _STATE else value_bytes[table]
            copy_bytes(address, in_address + offsets[i], size)
    return -1


@kernel
def note_gradients(
    kind, payload, row, source, offsets, is_chosen, step_of_row, contributors, tables, value_bytes,
    record_bytes, in_address, done, gradients,
):  # fmt: skip
    """Write down, steps x workers, the addresses of gradients received for due steps; mark those as done."""
    for i in range(len(kind)):
        if payload[i] & _GRADIENT and is_chosen[kind[i]]:
            step = step_of_row[row[i]] - 1
            if step >= 0 and contributors[step] & (np.uint64(1) << np.uint64(source[i])):
                behind, table = 0, tables[row[i]]
                if payload[i] & _VALUES:
                    behind = record_bytes[table] if payload[i] & _STATE else value_bytes[table]
                gradients[step, source[i]] = in_address + offsets[i] + behind
                done[i] = 1


@kernel
def steps_of_group(
    row, contributors, trained, gradients, tables, keys, records, group_of, position_of, group, num_tables
):  # fmt: skip
    """Pick the steps on rows of a group, table by table.

    Returns keys, starts of tables, records, contributors, iterations, and steps x workers the addresses of
    gradients received; the workers, as bits, of whom some are still buffered; and a row without a record,
    or -1.
    """
    starts, at = np.zeros(num_tables + 1, np.int64), np.empty(len(row), np.int32)
    places, count = np.empty(len(row) + 1, np.int64), 0
    for s in range(len(row)):
        at[s] = tables[row[s]]
        places[count] = s
        count += group_of[at[s]] == group
    places = _table_by_table(places, count, at, position_of, starts)
    num_workers = gradients.shape[1]
    some, held = np.empty(count, np.int64), np.empty(count, np.int64)
    theirs, iterations = np.empty(count, np.uint64), np.empty(count, np.int32)
    received = np.empty((count, num_workers), np.int64)
    waiting, missing = np.uint64(0), -1
    for i in range(count):
        s = places[i]
        r = row[s]
        some[i], held[i], theirs[i], iterations[i] = keys[r], records[r], contributors[s], trained[s]
        if records[r] < 0:
            missing = r
        for worker in range(num_workers):
            received[i, worker] = gradients[s, worker]
            bit = np.uint64(1) << np.uint64(worker)
            if gradients[s, worker] == 0:
                waiting |= contributors[s] & bit
    return some, starts, held, theirs, iterations, received, waiting, missing


@kernel
def buffered_rows(contributors, gradients, keys, starts, worker):
    """Of steps given table by table, pick those whose gradient of a worker was received earlier."""
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
def note_buffered(addresses, shift, record_bytes, places, locations, worker, gradients):
    """Write down the addresses of buffered gradients."""
    for i in range(len(places)):
        gradients[places[i], worker] = record_address(addresses, shift, record_bytes, locations[i])


@kernel
def sum_gradients(gradients, sums):
    """Sum the gradients of each row in the order of workers."""
    dim = sums.shape[1]
    for s in range(len(sums)):
        for k in range(dim):
            sums[s, k] = 0
        for worker in range(gradients.shape[1]):
            if gradients[s, worker] != 0:
                part = memory_at(gradients[s, worker], dim, sums.dtype)
                for k in range(dim):
                    sums[s, k] += part[k]


@register_jitable
def _roles(tables, trainers, states, mask, bounded, group_of, group, replicated, not_admitted, rows, roles):
    """Fill in the rows of a group that a worker trains or replicates, and their roles; return the count."""
    count = 0
    for r in range(len(tables)):
        trained, copied = trainers[r] & mask != 0, states[r] == replicated
        role = _OWN if bounded | (trainers[r] == mask) else _SHARED
        role = _REPLICATED if copied else role
        role = _NOT_ADMITTED if states[r] == not_admitted else role
        rows[count] = r
        roles[r] = role if trained else _OTHERS
        count += (trained | copied) & (group_of[tables[r]] == group)
    return count


@kernel
def sort_by_role(
    tables, keys, trainers, states, records, worker, bounded, group_of, position_of, group, num_tables,
    replicated, not_admitted,
):  # fmt: skip
    """Sort the rows of a group that a worker trains by role, and by table within each role.

    Returns keys, positions of tables and records (-1 where not admitted); where each role begins; of the
    admitted rows, table by table, their places among those, their keys, and where each table begins; the
    records of all replicated rows; which of these the worker trains; and their positions of tables and keys.
    """
    mask = np.uint64(1) << np.uint64(worker)
    rows, role_of = np.empty(len(tables) + 1, np.int64), np.empty(len(tables), np.int8)
    count = _roles(
        tables, trainers, states, mask, bounded, group_of, group, replicated, not_admitted, rows, role_of
    )
    every = np.zeros(num_tables + 1, np.int64)
    rows = _table_by_table(rows, count, tables, position_of, every)
    following = np.zeros(_OTHERS + 1, np.int64)
    for i in range(count):
        following[role_of[rows[i]]] += 1
    roles = np.zeros(_OTHERS + 1, np.int64)
    for role in range(_OTHERS):
        roles[role + 1] = roles[role] + following[role]
        following[role] = roles[role]
    following[_OTHERS] = roles[_OTHERS]
    num_trained, num_admitted = roles[_OTHERS], roles[_NOT_ADMITTED]
    chosen, positions = np.empty(count, np.int64), np.empty(count, np.int64)  # others last
    locations = np.empty(count, np.int64)
    order, ordered = np.empty(num_admitted + 1, np.int64), np.empty(num_admitted + 1, np.int64)
    copied, here = np.empty(count + 1, np.int64), np.empty(num_admitted - roles[_REPLICATED], np.int64)
    copied_at, copied_keys = np.empty(count + 1, np.int64), np.empty(count + 1, np.int64)
    starts = np.zeros(num_tables + 1, np.int64)
    admitted, copy = 0, 0
    for position in range(num_tables):
        for i in range(every[position], every[position + 1]):
            r = rows[i]
            role, key = role_of[r], keys[r]
            place = following[role]
            following[role] = place + 1
            chosen[place], positions[place] = key, position
            locations[place] = records[r] if role < _NOT_ADMITTED else -1
            order[admitted], ordered[admitted] = place, key
            admitted += role < _NOT_ADMITTED
            copied[copy], copied_at[copy], copied_keys[copy] = records[r], position, key
            if role == _REPLICATED:
                here[place - roles[_REPLICATED]] = copy
            copy += states[r] == replicated
        starts[position + 1] = admitted
    return (
        chosen[:num_trained], positions[:num_trained], locations[:num_trained], roles, order[:num_admitted],
        ordered[:num_admitted], starts, copied[:copy], here, copied_at[:copy], copied_keys[:copy],
    )  # fmt: skip
