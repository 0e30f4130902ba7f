"""Compiled loops over a mapped file of rows: finding records, pooling them, filling the file.

Bag ``b`` holds ``ids[offsets[b]:offsets[b + 1]]``. A feature has one bag for each sample or, where all
samples share it, one that is copied. Sums run in the order of the ids, as in training, so pooled vectors have
the same bits. A record is named by its address; 0: there is none.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int64, uint16, uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import (
    copy_bytes,
    data_address,
    keep_alive,
    load8,
    load64,
    memory_at,
    prefetch_to_read,
)
from rowhaul._vectors import add_row, clear_row, copy_row, size_of
from rowhaul.serve.row_file import BY_SLOT, FIELD, SLOTS
from rowhaul.store.packing_kernels import add_packed, occasion_seed, pack_row, unpack_row, value_bytes
from rowhaul.store.records import initial_values, mix

_RECORD_BYTES, _RECORDS_AT = FIELD["record_bytes"], FIELD["records_at"]
_FINDS_BY, _SEED, _NUM_BUCKETS = FIELD["finds_by"], FIELD["hash_seed"], FIELD["num_buckets"]
_STARTS_AT, _KEYS_AT, _OFFSETS_AT = FIELD["starts_at"], FIELD["keys_at"], FIELD["offsets_at"]
_MARKS_AT, _OWNERS_AT, _OWNER_BYTES = FIELD["marks_at"], FIELD["owners_at"], FIELD["owner_bytes"]
_POSITION, _FIRST_SHARED, _NUM_SHARED = FIELD["position"], FIELD["first_shared"], FIELD["num_shared"]
_DIM, _NUM_CHUNKS = FIELD["dim"], FIELD["num_chunks"]
_CHUNK_STARTS_AT, _COLUMNS_AT = FIELD["chunk_starts_at"], FIELD["columns_at"]
_INITIAL_SEED, _LOW, _STEP = FIELD["initial_seed"], FIELD["initial_low"], FIELD["initial_step"]
_INIT = 1  # of `UNKNOWN`
_SECOND = uint64(0x9E3779B97F4A7C15)  # as in `rowhaul.budget.slot_kernels`


@register_jitable
def _word(address):
    return int64(load64(uint64(address)))


@register_jitable
def bucket_of(hashed, num_buckets):
    """The bucket of a hash, by its upper half."""
    return int64(((hashed >> uint64(32)) * uint64(num_buckets)) >> uint64(32))


@register_jitable
def _place_of_key(key, bucket, starts_at, keys_at):
    """The place of a key among the rows of its bucket; -1: it has none."""
    for row in range(_word(starts_at + 8 * bucket), _word(starts_at + 8 * bucket + 8)):
        if _word(keys_at + 8 * row) == key:
            return row
    return -1


@register_jitable
def _slot_in(bucket, mark, table, base):
    """The slot of an id in a bucket; -1: it is not there."""
    found, wide = int64(-1), table[_OWNER_BYTES] == 2
    for slot in range(bucket * SLOTS, bucket * SLOTS + SLOTS):
        at = uint64(base + table[_MARKS_AT] + 2 * slot)
        if uint16(load8(at)) | (uint16(load8(at + uint64(1))) << uint16(8)) == mark:
            owner_at = uint64(base + table[_OWNERS_AT] + slot * table[_OWNER_BYTES])
            owner = int64(load8(owner_at))
            if wide:
                owner |= int64(load8(owner_at + uint64(1))) << 8
            if owner == table[_POSITION]:
                found = slot
    return found


@register_jitable
def _shared_row(bits, size):
    """Return which of ``size`` shared rows bits of a hash name, as `rowhaul.budget.sharing` does."""
    mask = size - uint64(1)  # becomes one less than the least power of two that is not below the size
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> uint64(shift)
    row = bits & mask
    return int64(row if row < size else bits & (mask >> uint64(1)))


@register_jitable
def _row_of_id(hashed, table, base):
    """The row that an id reads where ids share rows: its own, or one of those after all slots."""
    num_buckets = table[_NUM_BUCKETS]
    mark = uint16(hashed & uint64(0xFFFF))
    mark = uint16(1) if mark == 0 else mark
    slot = _slot_in(bucket_of(hashed, num_buckets), mark, table, base)
    if slot < 0:
        slot = _slot_in(bucket_of(mix(hashed ^ _SECOND), num_buckets), mark, table, base)
    if slot >= 0:
        return slot
    shared = _shared_row(hashed >> uint64(16), uint64(table[_NUM_SHARED]))
    return num_buckets * SLOTS + table[_FIRST_SHARED] + shared


@kernel
def locate_rows(base, tables, feature_tables, id_starts, ids, found, num_unknown):
    """Find the record of each id: feature ``f`` has ``ids[id_starts[f]:id_starts[f + 1]]``.

    In passes, each of which asks for the memory that the next one reads.
    """
    for feature in range(len(feature_tables)):
        table = tables[feature_tables[feature]]
        begin, end = id_starts[feature], id_starts[feature + 1]
        seed, num_buckets = uint64(table[_SEED]), table[_NUM_BUCKETS]
        records_at, record_bytes = base + table[_RECORDS_AT], table[_RECORD_BYTES]
        num_unknown[feature] = 0
        if table[_FINDS_BY] == BY_SLOT:
            for i in range(begin, end):
                bucket = bucket_of(mix(uint64(ids[i]) ^ seed), num_buckets)
                prefetch_to_read(base + table[_MARKS_AT] + 2 * SLOTS * bucket)
                prefetch_to_read(base + table[_OWNERS_AT] + table[_OWNER_BYTES] * SLOTS * bucket)
            for i in range(begin, end):
                row = _row_of_id(mix(uint64(ids[i]) ^ seed), table, base)
                found[i] = records_at + row * record_bytes
                prefetch_to_read(found[i])
            continue
        starts_at, keys_at = base + table[_STARTS_AT], base + table[_KEYS_AT]
        offsets_at = base + table[_OFFSETS_AT]
        for i in range(begin, end):
            found[i] = bucket_of(mix(uint64(ids[i]) ^ seed), num_buckets)
            prefetch_to_read(starts_at + 8 * found[i])
        for i in range(begin, end):
            prefetch_to_read(keys_at + 8 * _word(starts_at + 8 * found[i]))
        for i in range(begin, end):
            row = _place_of_key(ids[i], found[i], starts_at, keys_at)
            found[i] = 0
            if row < 0:
                num_unknown[feature] += 1
                continue
            offset = row * record_bytes if record_bytes else _word(offsets_at + 8 * row)
            found[i] = records_at + offset
            prefetch_to_read(found[i])


@register_jitable
def _row_seed(table, key):
    return mix(uint64(key) ^ uint64(table[_INITIAL_SEED]))


@register_jitable
def _add_chunks(target, record, table, base, dtype, size):
    """Add the stored chunks of a row to a vector."""
    num_chunks = table[_NUM_CHUNKS]
    values = record + (num_chunks + 31) // 32 * 4
    starts_at, columns_at = base + table[_CHUNK_STARTS_AT], base + table[_COLUMNS_AT]
    out = memory_at(target, table[_DIM], dtype)
    for chunk in range(num_chunks):
        if not (load8(uint64(record + chunk // 8)) >> (chunk % 8)) & 1:
            continue
        first, last = _word(starts_at + 8 * chunk), _word(starts_at + 8 * chunk + 8)
        stored = memory_at(values, last - first, dtype)
        for k in range(last - first):
            out[_word(columns_at + 8 * (first + k))] += stored[k]
        values += (last - first) * size


@kernel
def pool_whole(
    base, tables, feature_tables, targets, first_bags, lows, unknown, ids, offsets, found, out, num_samples
):
    """Write the pooled rows of each bag, values as they are; feature ``f`` begins at address ``targets[f]``.

    From one sample to the next it is a row of ``out``. A bag that samples share is copied for
    ``num_samples``; 1: it is not.
    """
    zero, one = out.dtype.type(0), out.dtype.type(1)
    size = size_of(zero)
    sample_bytes = out.shape[1] * size
    for feature in range(len(feature_tables)):
        table = tables[feature_tables[feature]]
        dim, mode = table[_DIM], unknown[feature_tables[feature]]
        low, step = lows[feature_tables[feature], 0], lows[feature_tables[feature], 1]
        spare = np.empty(dim, out.dtype)
        num_bags = first_bags[feature + 1] - first_bags[feature]
        for sample in range(num_bags):
            bag = first_bags[feature] + sample
            begin, end = offsets[bag], offsets[bag + 1]
            target = targets[feature] + sample * sample_bytes
            if begin == end or table[_NUM_CHUNKS]:
                clear_row(target, dim, zero)
            for i in range(begin, end):
                row = found[i]
                if table[_NUM_CHUNKS]:
                    if row:
                        _add_chunks(target, row, table, base, out.dtype, size)
                    continue
                if row == 0:
                    if mode == _INIT:
                        initial_values(spare, dim, _row_seed(table, ids[i]), low, step)
                    else:
                        spare[:] = zero
                    row = data_address(spare)
                if i == begin:
                    copy_row(target, row, dim * size)
                else:
                    add_row(target, row, dim, one)
        keep_alive(spare)
        for sample in range(num_bags, num_samples):
            copy_row(targets[feature] + sample * sample_bytes, targets[feature], dim * size)


@kernel
def pool_packed(
    base, tables, feature_tables, targets, first_bags, lows, unknown, ids, offsets, found, out, num_samples,
    like,
):  # fmt: skip
    """`pool_whole` of rows in few bits; the type of ``like`` says in which: see `rowhaul._packed_vectors`."""
    zero, one = float32(0), float32(1)
    sample_bytes = 4 * out.shape[1]
    for feature in range(len(feature_tables)):
        table = tables[feature_tables[feature]]
        dim, mode = table[_DIM], unknown[feature_tables[feature]]
        low, step = lows[feature_tables[feature], 0], lows[feature_tables[feature], 1]
        spare, packed = np.empty(dim, np.float32), np.zeros(value_bytes(dim, like) // 4, np.float32)
        num_bags = first_bags[feature + 1] - first_bags[feature]
        for sample in range(num_bags):
            bag = first_bags[feature] + sample
            begin, end = offsets[bag], offsets[bag + 1]
            target = targets[feature] + sample * sample_bytes
            if begin == end:
                clear_row(target, dim, zero)
            for i in range(begin, end):
                row = found[i]
                if row == 0:
                    packed[:] = zero
                    if mode == _INIT:  # rounded, as the row would begin
                        row_seed = _row_seed(table, ids[i])
                        initial_values(spare, dim, row_seed, low, step)
                        pack_row(
                            data_address(packed), data_address(spare), dim, occasion_seed(row_seed, 0), like
                        )
                    row = data_address(packed)
                if i == begin:
                    unpack_row(target, row, dim, like)
                else:
                    add_packed(target, row, dim, one, like)
        keep_alive(spare)
        keep_alive(packed)
        for sample in range(num_bags, num_samples):
            copy_row(targets[feature] + sample * sample_bytes, targets[feature], 4 * dim)


# Writing a file.


@kernel
def count_buckets(keys, seed, counts):
    """Count how many keys each bucket gets."""
    for i in range(len(keys)):
        counts[bucket_of(mix(uint64(keys[i]) ^ seed), len(counts))] += 1


@kernel
def place_keys(keys, seed, starts, num_placed, placed):
    """Put keys into their buckets, in order within each."""
    num_buckets = len(starts) - 1
    for i in range(len(keys)):
        bucket = bucket_of(mix(uint64(keys[i]) ^ seed), num_buckets)
        row = starts[bucket] + num_placed[bucket]
        num_placed[bucket] += 1
        while row > starts[bucket] and placed[row - 1] > keys[i]:
            placed[row] = placed[row - 1]
            row -= 1
        placed[row] = keys[i]


@kernel
def rows_of_keys(keys, seed, starts, placed, rows):
    """Find the row of each key; -1: it has none."""
    starts_at, keys_at = data_address(starts), data_address(placed)
    for i in range(len(keys)):
        bucket = bucket_of(mix(uint64(keys[i]) ^ seed), len(starts) - 1)
        rows[i] = _place_of_key(keys[i], bucket, starts_at, keys_at)


@kernel
def copy_records(target, places, lengths, data):
    """Copy records that lie one after the other to their places from an address on."""
    source = data_address(data)
    for i in range(len(lengths)):
        copy_bytes(target + places[i], source, lengths[i])
        source += lengths[i]
