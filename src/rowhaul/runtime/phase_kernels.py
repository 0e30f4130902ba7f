"""Compiled loops over moves, steps and payloads: what a rank sends, receives and steps in each phase.

Keys are returned table by table, as `rowhaul.store.index` expects them, after a counting sort.
"""

from __future__ import annotations

import numpy as np
from numba import int64, uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import leading_zeros
from rowhaul._scramble import placed_row

_VALUES, _STATE, _GRADIENT = 1, 2, 4  # `rowhaul.schedule.plan.Payload`
_MISS_PULL, _UPDATE_PUSH, _EVICT_PUSH = 0, 1, 2  # `rowhaul.schedule.plan.Kind`


@kernel
def unnumbered(rows, source, target, rank):
    """Return which moves or steps of a rank have no row number yet."""
    places = np.empty(len(rows) + 1, np.int64)
    count = 0
    for m in range(len(rows)):
        places[count] = m  # branch-free
        count += (rows[m] < 0) & ((source[m] == rank) | (target[m] == rank))
    return places[:count]


@register_jitable
def _slot_of(slots, tables, keys, table, key):
    """The slot of a row, or an empty one."""
    mask = len(slots) - 1
    slot = int64(placed_row(table, key) >> uint64(leading_zeros(uint64(mask))))
    while slots[slot] != 0 and (keys[slots[slot] - 1] != key or tables[slots[slot] - 1] != table):
        slot = (slot + 1) & mask
    return slot


@kernel
def number_rows(tables, keys, num_known, table, key):
    """Number rows, each pair (table, key) once: those of the first ``num_known`` as they are, others anew.

    Returns the numbers, and the tables and keys of all rows: the given ones, then the new ones.
    """
    size = 16
    while size < 2 * (num_known + len(key)):
        size *= 2
    slots, count = np.zeros(size, np.int32), len(keys)
    all_tables, all_keys = np.empty(count + len(key), np.int32), np.empty(count + len(key), np.int64)
    all_tables[:count], all_keys[:count] = tables, keys
    for r in range(num_known):
        slots[_slot_of(slots, all_tables, all_keys, tables[r], keys[r])] = r + 1
    numbers = np.empty(len(key), np.int32)
    for i in range(len(key)):
        slot = _slot_of(slots, all_tables, all_keys, table[i], key[i])
        if slots[slot] == 0:
            all_tables[count], all_keys[count] = table[i], key[i]
            count += 1
            slots[slot] = count
        numbers[i] = slots[slot] - 1
    return numbers, all_tables[:count], all_keys[:count]


@kernel
def mark_needed(
    num_rows, trainers, states, mask, replicated, sent_kind, sent_row, received_kind, received_row, step_row,
    step_by_peer,
):  # fmt: skip
    """Mark what a rank needs of each row: 1, the record in its cache; 2, the record at its home; or both."""
    needed = np.zeros(num_rows, np.uint8)
    for r in range(len(trainers)):
        needed[r] = (trainers[r] & mask != 0) | ((states[r] == replicated) & (mask != 0))
    for m in range(len(sent_row)):
        needed[sent_row[m]] |= 2 if sent_kind[m] == _MISS_PULL else 1
    for m in range(len(received_row)):
        pushed = received_kind[m] == _UPDATE_PUSH or received_kind[m] == _EVICT_PUSH
        needed[received_row[m]] |= 2 if pushed else 1
    for s in range(len(step_row)):
        needed[step_row[s]] |= 1 if step_by_peer[s] else 2
    return needed


@register_jitable
def _own_moves(moves, rank, sends):
    """Return which moves are a rank's, and the peer of every move; branch-free, as no guess would hold."""
    source, target = moves[2], moves[3]
    ours, theirs = (source, target) if sends else (target, source)
    chosen = np.empty(len(ours) + 1, np.int32)
    count = 0
    for m in range(len(ours)):
        chosen[count] = m
        count += ours[m] == rank
    return chosen[:count], theirs


@register_jitable
def _count_moves(moves, chosen, theirs, counts, kind_bytes):
    kind, _, _, _, num_bytes, phases, _ = moves
    for m in chosen:
        counts[phases[m], theirs[m]] += 1
        kind_bytes[phases[m], theirs[m], kind[m]] += num_bytes[m]


@register_jitable
def _fill_moves(moves, chosen, theirs, out, offsets, following, ends, has_gradients):
    kind, payload, source, _, num_bytes, phases, row = moves
    kinds, payloads, sources, rows = out
    for m in chosen:
        phase, peer = phases[m], theirs[m]
        place = following[phase, peer]
        following[phase, peer] = place + 1
        kinds[place], payloads[place], sources[place], rows[place] = kind[m], payload[m], source[m], row[m]
        offsets[place] = ends[phase, peer]
        ends[phase, peer] += num_bytes[m]
        has_gradients[phase] |= (payload[m] & _GRADIENT) != 0


@kernel
def sort_moves(moves, within, rank, num_ranks, num_kinds, num_phases, sends):
    """Sort the moves that a rank sends (or receives) by phase, peer and place in the plan; its own last.

    Moves between ranks and moves within one are tuples of columns: kind, payload, source, target, bytes,
    phase, row. Returns columns (kind, payload, source, row) and where each payload begins in the buffer of
    its phase; phases x peers the number of moves, and where each message begins and ends in that buffer;
    bytes by phase, peer and kind; and whether each phase has gradients.
    """
    chosen, theirs = _own_moves(moves, rank, sends)
    chosen_within, theirs_within = _own_moves(within, rank, sends)
    counts = np.zeros((num_phases, num_ranks), np.int64)
    kind_bytes = np.zeros((num_phases, num_ranks, num_kinds), np.int64)
    _count_moves(moves, chosen, theirs, counts, kind_bytes)
    _count_moves(within, chosen_within, theirs_within, counts, kind_bytes)
    following, begins = np.zeros_like(counts), np.zeros_like(counts)
    total = 0
    for phase in range(num_phases):
        end = 0
        for step in range(1, num_ranks + 1):
            # In order of rank, with this rank last.
            peer = rank if step == num_ranks else (step - 1 if step <= rank else step)
            following[phase, peer] = total
            begins[phase, peer] = end
            total += counts[phase, peer]
            end += kind_bytes[phase, peer].sum()
    kinds, payloads = np.empty(total, np.uint8), np.empty(total, np.uint8)
    out = kinds, payloads, np.empty(total, np.int16), np.empty(total, np.int32)
    offsets, ends, has_gradients = np.empty(total, np.int64), begins.copy(), np.zeros(num_phases, np.bool_)
    _fill_moves(moves, chosen, theirs, out, offsets, following, ends, has_gradients)
    _fill_moves(within, chosen_within, theirs_within, out, offsets, following, ends, has_gradients)
    return out, offsets, counts, begins, ends, kind_bytes, has_gradients


@kernel
def sort_steps(ranks, phases, by_peer, rank, num_phases):
    """Sort the steps that a rank takes by phase and by whether it does so as a peer; also return starts."""
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
def pick_gradients(
    kind, payload, source, row, offsets, is_chosen, done, tables, keys, group_of, position_of, group,
    num_tables, value_bytes, record_bytes,
):  # fmt: skip
    """Pick the gradients in a group among payloads of the chosen kinds that are not done, by worker.

    Returns their keys, workers x tables + 1 where each table of each worker begins, and where they are in
    the buffer.
    """
    chosen, num_workers = np.empty(len(kind), np.int64), 0
    count = 0
    for i in range(len(kind)):
        waits = payload[i] & _GRADIENT and is_chosen[kind[i]] and not done[i]
        if waits and group_of[tables[row[i]]] == group:
            chosen[count] = i
            count += 1
            num_workers = max(num_workers, source[i] + 1)
    chosen = chosen[:count]
    starts = np.zeros((num_workers, num_tables + 1), np.int64)
    for c in chosen:
        starts[source[c], position_of[tables[row[c]]] + 1] += 1
    total = 0
    for worker in range(num_workers):
        starts[worker, 0] = total
        for position in range(num_tables):
            starts[worker, position + 1] += starts[worker, position]
        total = starts[worker, num_tables]
    following = starts.copy()
    picked, begins = np.empty(count, np.int64), np.empty(count, np.int64)
    for c in chosen:
        position = position_of[tables[row[c]]]
        place = following[source[c], position]
        following[source[c], position] = place + 1
        behind = 0
        if payload[c] & _VALUES:
            behind = record_bytes if payload[c] & _STATE else value_bytes
        picked[place], begins[place] = keys[row[c]], offsets[c] + behind
    return picked, starts, begins


@register_jitable
def _lengths_of(lengths):
    """The length that all samples have, or -1; the longest; and the sum. A few vector passes."""
    differing, most, total = 0, 0, 0
    for i in range(len(lengths)):
        differing |= lengths[i] ^ lengths[0]
        most = max(most, lengths[i])
        total += lengths[i]
    common = lengths[0] if len(lengths) and not differing else -1
    return common, most, total


@kernel
def take_ids(values, lengths, places):
    """Return the ids of some samples of a jagged batch, feature by feature, and their lengths.

    ``places`` ascend. Where all samples have as many ids of a feature, only those taken are looked at.
    """
    num_features, num_samples = lengths.shape
    taken_lengths = np.empty((num_features, len(places)), np.int32)
    is_taken = np.zeros(num_samples, np.int32)
    for place in places:
        is_taken[place] = 1
    total = 0
    for feature in range(num_features):
        for i in range(len(places)):
            length = lengths[feature, places[i]]
            taken_lengths[feature, i] = length
            total += length
    taken = np.empty(total + 1, np.int64)
    begin, end, last = 0, 0, len(values) - 1
    for feature in range(num_features):
        common, most, count = _lengths_of(lengths[feature])
        if common == 1:
            for i in range(len(places)):
                taken[end + i] = values[begin + places[i]]
            end += len(places)
        elif most == 1:  # without a branch, as no guess would hold
            first = begin
            for sample in range(num_samples):
                taken[end] = values[min(first, last)]
                end += lengths[feature, sample] & is_taken[sample]
                first += lengths[feature, sample]
        elif most > 1:
            first = begin
            for sample in range(num_samples):
                length = lengths[feature, sample]
                if is_taken[sample]:
                    for k in range(length):
                        taken[end + k] = values[first + k]
                    end += length
                first += length
        begin += count
    return taken[:total], taken_lengths
