"""Compiled loops over batches of ids: turning them around, and naming where a row is at home."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel


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
    tables = np.empty(len(values), np.int32)
    keys = np.empty(len(values), np.int64)
    cursor = offsets[:-1].copy()
    at = 0
    for f in range(num_features):
        table = feature_tables[f]
        for i in range(num_samples):
            place = cursor[i]
            for _ in range(lengths[f, i]):
                tables[place] = table
                keys[place] = values[at]
                place += 1
                at += 1
            cursor[i] = place
    return offsets, tables, keys


@kernel
def row_hash(table, key):
    """A well-mixed 64-bit hash of a row's name (the finisher of SplitMix64)."""
    h = np.uint64(key) + np.uint64(table + 1) * np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@kernel
def home_shard(table, key, num_shards):
    """Which of the shards stores a row. High bits: the directory's index uses the low ones."""
    if num_shards == 1:
        return 0
    return np.int64((row_hash(table, key) >> np.uint64(32)) % np.uint64(num_shards))


@kernel
def home_shards(tables, keys, first_store, num_shards):
    """The ranks that store these rows."""
    homes = np.empty(len(keys), np.int16)
    for r in range(len(keys)):
        homes[r] = first_store + home_shard(tables[r], keys[r], num_shards)
    return homes
