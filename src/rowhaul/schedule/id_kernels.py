"""Compiled loops over batches of ids: turning them around, where rows are at home, when moves travel."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel

_EARLY_FIRST, _LATE_FIRST, _AFTER = 0, 2, 4  # of `rowhaul.schedule.phases.Phase`
TURNED_AT_ONCE = 64  # samples: what is written of them stays in the fastest memory


@kernel
def least_most_and_sum(lengths):
    """The least of all numbers, at most 0, the largest, at least 0, and their sum."""
    least, most, total = np.int32(0), np.int32(0), np.int64(0)
    for f in range(lengths.shape[0]):
        for i in range(lengths.shape[1]):
            least = min(least, lengths[f, i])
            most = max(most, lengths[f, i])
            total += lengths[f, i]
    return least, most, total


@kernel
def to_sample_major(feature_tables, values, lengths):
    """Offsets, tables and keys sample by sample, from ids held feature by feature."""
    num_features, num_samples = lengths.shape
    offsets = np.zeros(num_samples + 1, np.int64)
    for f in range(num_features):
        for i in range(num_samples):
            offsets[i + 1] += lengths[f, i]
    for i in range(num_samples):
        offsets[i + 1] += offsets[i]
    reading = np.zeros(num_features, np.int64)  # features: the next id
    for f in range(1, num_features):
        reading[f] = reading[f - 1]
        for i in range(num_samples):
            reading[f] += lengths[f - 1, i]
    num_ids = len(values)
    tables = np.empty(num_ids + 1, np.int32)  # one more: what is written there counts for nothing
    keys = np.empty(num_ids + 1, np.int64)
    writing = offsets[:-1].copy()
    for first in range(0, num_samples, TURNED_AT_ONCE):
        end = min(first + TURNED_AT_ONCE, num_samples)
        for f in range(num_features):
            table, at = feature_tables[f], reading[f]
            for i in range(first, end):
                place, length = writing[i], np.int64(lengths[f, i])
                writing[i] = place + length
                if length > 1:
                    for n in range(length):
                        tables[place + n] = table
                        keys[place + n] = values[at + n]
                else:  # without a branch: which ids are missing cannot be foreseen
                    place = place if length == 1 else num_ids
                    tables[place] = table
                    keys[place] = values[min(at, num_ids - 1)] if num_ids > 0 else 0
                at += length
            reading[f] = at
    return offsets, tables[:num_ids], keys[:num_ids]


@kernel
def row_hash(table, key):
    """A well-mixed 64-bit hash of a row's name (the finisher of SplitMix64)."""
    h = np.uint64(key) + np.uint64(table + 1) * np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@kernel
def home_shard(table, key, sharding):
    """Which of the shards stores a row; ``sharding`` as of `Topology`.

    High bits of the hash: the directory's index uses the low ones.
    """
    num_shards = sharding & 0xFFFF
    if num_shards == 1:
        return 0
    others = sharding >> 16
    if others > 0:
        table = table // (others + 1)
    return np.int64((row_hash(table, key) >> np.uint64(32)) % np.uint64(num_shards))


@kernel
def home_shards(tables, keys, first_store, sharding):
    """The ranks that store these rows."""
    homes = np.empty(len(keys), np.int16)
    for r in range(len(keys)):
        homes[r] = first_store + home_shard(tables[r], keys[r], sharding)
    return homes


@kernel
def phase_numbers(iteration, ready, second, after):
    """Phases by their numbers; where nothing is second, ``second`` is None."""
    phases = np.empty(len(ready), np.int64)
    for m in range(len(ready)):
        phase = _EARLY_FIRST if ready[m] < iteration else _LATE_FIRST
        if second is not None:
            phase += second[m]
        phases[m] = _AFTER if after[m] else phase
    return phases
