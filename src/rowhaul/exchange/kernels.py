"""Compiled loops of the runtime: the rows that a worker trains, and what a rank sends and receives when."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel


@kernel
def rows_of_worker(trainers, worker):
    """The rows of a batch that a worker trains, and for each whether it alone does."""
    mask = np.uint64(1) << np.uint64(worker)
    rows = np.empty(len(trainers), np.int64)
    alone = np.empty(len(trainers), np.bool_)
    count = 0
    for r in range(len(trainers)):
        if trainers[r] & mask:
            rows[count] = r
            alone[count] = trainers[r] == mask
            count += 1
    return rows[:count], alone[:count]


@kernel
def sort_out(kind, payload, table, key, source, target, num_bytes, turns, rank, num_ranks, num_turns, sends):
    """The moves that a rank sends (or receives), by turn, peer and place in the plan.

    Returns their columns, where each begins in the buffer of its turn, the number of them by turn and the
    end of every message in its turn's buffer, turns x ranks (0 where there is none).
    """
    ours, theirs = (source, target) if sends else (target, source)
    counts = np.zeros((num_turns, num_ranks), np.int64)
    for m in range(len(kind)):
        if ours[m] == rank:
            counts[turns[m], theirs[m]] += 1
    following = np.zeros((num_turns, num_ranks), np.int64)
    total = 0
    for turn in range(num_turns):
        for peer in range(num_ranks):
            following[turn, peer] = total
            total += counts[turn, peer]
    kinds, payloads = np.empty(total, np.uint8), np.empty(total, np.uint8)
    tables, keys, sources = np.empty(total, np.int32), np.empty(total, np.int64), np.empty(total, np.int16)
    offsets = np.empty(total, np.int64)
    for m in range(len(kind)):
        if ours[m] == rank:
            place = following[turns[m], theirs[m]]
            following[turns[m], theirs[m]] += 1
            kinds[place], payloads[place] = kind[m], payload[m]
            tables[place], keys[place], sources[place] = table[m], key[m], source[m]
            offsets[place] = num_bytes[m]
    ends = np.zeros((num_turns, num_ranks), np.int64)
    per_turn = np.zeros(num_turns, np.int64)
    place = 0
    for turn in range(num_turns):
        offset = 0
        for peer in range(num_ranks):
            for _ in range(counts[turn, peer]):
                size = offsets[place]
                offsets[place] = offset
                offset += size
                place += 1
            if counts[turn, peer]:
                ends[turn, peer] = offset
        per_turn[turn] = counts[turn].sum()
    return kinds, payloads, tables, keys, sources, offsets, per_turn, ends
