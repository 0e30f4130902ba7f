"""Compiled loops of the runtime: what a rank sends, receives and steps when, and whose rows those are.

Rows come out table by table, as `rowhaul.store.index` takes them: a counting sort each, no searching.
"""

from __future__ import annotations

import numpy as np
from numba import int64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul.store.records import mix

_VALUES, _STATE, _GRADIENT = 1, 2, 4  # `rowhaul.schedule.plan.Payload`
_MISS_PULL, _UPDATE_PUSH, _EVICT_PUSH = 0, 1, 2  # `rowhaul.schedule.plan.Kind`
_GRADIENTS, _OTHERS = 0, 1  # what a turn may have


@kernel
def index_rows(tables, keys):
    """Slots that the rows of a plan are found by; see `rows_of_plan`."""
    size = 16
    while size < 2 * len(keys):
        size *= 2
    slots = np.zeros(size, np.int32)
    for r in range(len(keys)):
        slot = int64(mix(keys[r] + tables[r])) & (size - 1)
        while slots[slot] != 0:
            slot = (slot + 1) & (size - 1)
        slots[slot] = r + 1
    return slots


@kernel
def rows_of_plan(slots, tables, keys, source, target, rank, table, key):
    """The place in a plan of the rows that a rank sends, receives or steps; -1 where it is none of the batch.

    (A row that is evicted is none of them.)
    """
    rows = np.full(len(key), -1, np.int32)
    mask = len(slots) - 1
    for m in range(len(key)):
        if (source[m] == rank) | (target[m] == rank):
            slot = int64(mix(key[m] + table[m])) & mask
            place = slots[slot] - 1
            while place >= 0 and (keys[place] != key[m] or tables[place] != table[m]):
                slot = (slot + 1) & mask
                place = slots[slot] - 1
            rows[m] = place
    return rows


@kernel
def mark_needed(trainers, mask, sent_kind, sent_row, received_kind, received_row, step_row, step_by_peer):
    """What a rank needs of each row of a plan: 1, the record in its cache; 2, that of its home; or both."""
    needed = np.zeros(len(trainers), np.uint8)
    for r in range(len(trainers)):
        if trainers[r] & mask:
            needed[r] = 1
    for m in range(len(sent_row)):
        if sent_row[m] >= 0:
            needed[sent_row[m]] |= 2 if sent_kind[m] == _MISS_PULL else 1
    for m in range(len(received_row)):
        if received_row[m] >= 0 and (received_kind[m] == _UPDATE_PUSH or received_kind[m] == _EVICT_PUSH):
            needed[received_row[m]] |= 2
    for s in range(len(step_row)):
        if step_row[s] >= 0:
            needed[step_row[s]] |= 1 if step_by_peer[s] else 2
    return needed


@register_jitable
def _moves_of(ours, rank):
    """Which moves are a rank's; without a branch, since nothing tells whose the next one is."""
    chosen = np.empty(len(ours) + 1, np.int32)
    count = 0
    for m in range(len(ours)):
        chosen[count] = m
        count += ours[m] == rank
    return chosen[:count]


@register_jitable
def _count_moves(chosen, theirs, phases, kind, num_bytes, counts, kind_bytes):
    for m in chosen:
        counts[phases[m], theirs[m]] += 1
        kind_bytes[phases[m], theirs[m], kind[m]] += num_bytes[m]


@register_jitable
def _fill_moves(chosen, theirs, phases, num_bytes, columns, out, offsets, following, ends, has):
    kind, payload, table, key, source, row = columns
    kinds, payloads, tables, keys, sources, rows = out
    for m in chosen:
        phase, peer = phases[m], theirs[m]
        place = following[phase, peer]
        following[phase, peer] = place + 1
        kinds[place], payloads[place], tables[place] = kind[m], payload[m], table[m]
        keys[place], sources[place], rows[place] = key[m], source[m], row[m]
        offsets[place] = ends[phase, peer]
        ends[phase, peer] += num_bytes[m]
        has[phase, _GRADIENTS] |= (payload[m] & _GRADIENT) != 0
        has[phase, _OTHERS] |= row[m] < 0


@kernel
def sort_out(
    kind, payload, table, key, source, target, num_bytes, phases, row,
    kind2, payload2, table2, key2, source2, target2, num_bytes2, phases2, row2,
    rank, num_ranks, num_kinds, num_phases, sends,
):  # fmt: skip
    """The moves that a rank sends (or receives), by turn, peer and place in the plan; its own come last.

    Moves come in two parts, between ranks and within one. Returns their columns and where each begins in
    the buffer of its turn; turns x peers how many they are, and where each message begins and ends in that
    buffer; bytes by turn, peer and kind; and whether each turn has gradients, and rows not of the batch.
    """
    ours, theirs = (source, target) if sends else (target, source)
    ours2, theirs2 = (source2, target2) if sends else (target2, source2)
    chosen, chosen2 = _moves_of(ours, rank), _moves_of(ours2, rank)
    counts = np.zeros((num_phases, num_ranks), np.int64)
    kind_bytes = np.zeros((num_phases, num_ranks, num_kinds), np.int64)
    _count_moves(chosen, theirs, phases, kind, num_bytes, counts, kind_bytes)
    _count_moves(chosen2, theirs2, phases2, kind2, num_bytes2, counts, kind_bytes)
    following, begins = np.zeros_like(counts), np.zeros_like(counts)
    total = 0
    for phase in range(num_phases):
        end = 0
        for step in range(1, num_ranks + 1):
            # In order of rank, but for this one itself.
            peer = rank if step == num_ranks else (step - 1 if step <= rank else step)
            following[phase, peer] = total
            begins[phase, peer] = end
            total += counts[phase, peer]
            end += kind_bytes[phase, peer].sum()
    out = (
        np.empty(total, np.uint8),
        np.empty(total, np.uint8),
        np.empty(total, np.int32),
        np.empty(total, np.int64),
        np.empty(total, np.int16),
        np.empty(total, np.int32),
    )
    offsets, ends, has = np.empty(total, np.int64), begins.copy(), np.zeros((num_phases, 2), np.bool_)
    columns = (kind, payload, table, key, source, row)
    _fill_moves(chosen, theirs, phases, num_bytes, columns, out, offsets, following, ends, has)
    columns = (kind2, payload2, table2, key2, source2, row2)
    _fill_moves(chosen2, theirs2, phases2, num_bytes2, columns, out, offsets, following, ends, has)
    return out, offsets, counts, begins, ends, kind_bytes, has


@kernel
def sort_steps(ranks, phases, by_peer, rank, num_phases):
    """The steps that a rank takes, by turn and by whether a peer takes them; and where each kind begins."""
    starts = np.zeros(2 * num_phases + 1, np.int64)
    for s in range(len(ranks)):
        if ranks[s] == rank:
            starts[2 * phases[s] + by_peer[s] + 1] += 1
    for cell in range(2 * num_phases):
        starts[cell + 1] += starts[cell]
    following = starts.copy()
    places = np.empty(starts[-1], np.int64)
    for s in range(len(ranks)):
        if ranks[s] == rank:
            cell = 2 * phases[s] + by_peer[s]
            places[following[cell]] = s
            following[cell] += 1
    return places, starts


@kernel
def pick_records(
    kind, payload, table, key, row, offsets, is_chosen, most, group_of, position_of, group, num_tables,
    value_bytes, record_bytes,
):  # fmt: skip
    """The records among payloads of the chosen kinds, in a group, of rows before ``most`` in the plan.

    Returns their keys, table by table, where each table begins, and the bytes of each record in the buffer.
    """
    starts = np.zeros(num_tables + 1, np.int64)
    for i in range(len(kind)):
        if payload[i] & _VALUES and is_chosen[kind[i]] and row[i] < most and group_of[table[i]] == group:
            starts[position_of[table[i]] + 1] += 1
    for position in range(num_tables):
        starts[position + 1] += starts[position]
    following = starts.copy()
    keys = np.empty(starts[-1], np.int64)
    lengths, begins = np.empty_like(keys), np.empty_like(keys)
    for i in range(len(kind)):
        if payload[i] & _VALUES and is_chosen[kind[i]] and row[i] < most and group_of[table[i]] == group:
            place = following[position_of[table[i]]]
            following[position_of[table[i]]] = place + 1
            keys[place], begins[place] = key[i], offsets[i]
            lengths[place] = record_bytes if payload[i] & _STATE else value_bytes
    return keys, starts, lengths, begins


@kernel
def pick_gradients(
    kind, payload, table, key, source, offsets, is_chosen, done, group_of, position_of, group, num_tables,
    value_bytes, record_bytes,
):  # fmt: skip
    """The gradients among payloads of the chosen kinds in a group that are not done, worker by worker.

    Returns their keys, workers x tables + 1 where each table of each worker begins, and where they are in
    the buffer.
    """
    num_workers = 0
    for i in range(len(kind)):
        if payload[i] & _GRADIENT and is_chosen[kind[i]] and not done[i] and group_of[table[i]] == group:
            num_workers = max(num_workers, source[i] + 1)
    starts = np.zeros((num_workers, num_tables + 1), np.int64)
    for i in range(len(kind)):
        if payload[i] & _GRADIENT and is_chosen[kind[i]] and not done[i] and group_of[table[i]] == group:
            starts[source[i], position_of[table[i]] + 1] += 1
    total = 0
    for worker in range(num_workers):
        starts[worker, 0] = total
        for position in range(num_tables):
            starts[worker, position + 1] += starts[worker, position]
        total = starts[worker, num_tables]
    following = starts.copy()
    keys, begins = np.empty(total, np.int64), np.empty(total, np.int64)
    for i in range(len(kind)):
        if payload[i] & _GRADIENT and is_chosen[kind[i]] and not done[i] and group_of[table[i]] == group:
            place = following[source[i], position_of[table[i]]]
            following[source[i], position_of[table[i]]] = place + 1
            behind = 0
            if payload[i] & _VALUES:
                behind = record_bytes if payload[i] & _STATE else value_bytes
            keys[place], begins[place] = key[i], offsets[i] + behind
    return keys, starts, begins


@kernel
def pick_rows(table, group_of, position_of, group, num_tables):
    """The places of rows whose tables are in a group, table by table, and where each table begins."""
    starts = np.zeros(num_tables + 1, np.int64)
    for i in range(len(table)):
        if group_of[table[i]] == group:
            starts[position_of[table[i]] + 1] += 1
    for position in range(num_tables):
        starts[position + 1] += starts[position]
    following = starts.copy()
    places = np.empty(starts[-1], np.int64)
    for i in range(len(table)):
        if group_of[table[i]] == group:
            places[following[position_of[table[i]]]] = i
            following[position_of[table[i]]] += 1
    return places, starts


@kernel
def rows_of_contributor(contributors, keys, starts, worker):
    """Of rows that come table by table, those that a worker has a gradient of: places, keys, starts."""
    mask = np.uint64(1) << np.uint64(worker)
    places, some, begins = np.empty_like(keys), np.empty_like(keys), np.empty_like(starts)
    count = 0
    for position in range(len(starts) - 1):
        begins[position] = count
        for i in range(starts[position], starts[position + 1]):
            if contributors[i] & mask:
                places[count], some[count] = i, keys[i]
                count += 1
    begins[-1] = count
    return places[:count], some[:count], begins


@kernel
def take_ids(values, lengths, places):
    """The ids of some samples of a jagged batch, feature by feature, and how many each has of each."""
    num_features, num_samples = lengths.shape
    taken_lengths = np.empty((num_features, len(places)), np.int32)
    total = 0
    for feature in range(num_features):
        for i in range(len(places)):
            taken_lengths[feature, i] = lengths[feature, places[i]]
            total += lengths[feature, places[i]]
    taken = np.empty(total, np.int64)
    begin, end = 0, 0
    for feature in range(num_features):
        following = 0
        for sample in range(num_samples):
            length = lengths[feature, sample]
            if following < len(places) and places[following] == sample:
                for k in range(length):
                    taken[end + k] = values[begin + k]
                end += length
                following += 1
            begin += length
    return taken, taken_lengths
