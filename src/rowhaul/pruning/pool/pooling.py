"""Pooled reads of rows in pieces, and the way back for gradients; bags as in `rowhaul.store.pooling`.

Frequent rows are read many times in a batch, so each distinct row is put together from its chunks once, and
samples copy whole rows. Samples are done in blocks, all features of a few and then of the next few: what is
written, or read on the way back, then lies close together, instead of one piece a page. An id whose row has
no entry has row -1.
"""

from __future__ import annotations

from numba import int32

from rowhaul._kernels import kernel
from rowhaul._memory import data_address, prefetch_to_read, prefetch_to_write, record_at
from rowhaul._vectors import add_row, clear_row, copy_row, load_one, size_of

_ROWS_AHEAD = 8
_SAMPLES_AHEAD = 8
_POOLED_BLOCK = 16
_SUMMED_BLOCK = 32
_CACHE_LINE = 64


@kernel
def assemble_rows(
    addresses, shift, width, chunks, held, zeros, starts, table_starts, stored_columns, scattered, places,
    rows,
):  # fmt: skip
    """Put rows, given table by table, together from their chunks.

    Row ``i`` becomes row ``places[i + 1]`` of ``rows``. Row 0 of these is zeros: it stands for all that hold
    nothing, and for ids without an entry, which have number -1. ``zeros`` are as wide as a chunk: absent ones
    are copied from there, without a branch on what is there, which no processor can guess.
    """
    num_chunks, num_values, last = chunks.shape[1], rows.shape[1], len(held) - 1
    zero = rows.dtype.type(0)
    size = size_of(zero)
    pool, nothing, record_bytes = data_address(addresses), data_address(zeros), width * size
    numbers, memory, row_bytes = data_address(chunks), data_address(rows), num_values * size
    clear_row(memory, num_values, zero)
    places[0] = 0
    count = 0
    for table in range(len(table_starts) - 1):
        for i in range(table_starts[table], table_starts[table + 1]):
            soon = min(i + _ROWS_AHEAD, last)
            for k in range(num_chunks if held[soon] else 0):
                number = load_one(numbers + 4 * (soon * num_chunks + k), int32(0))
                address = record_at(pool, shift, record_bytes, max(number, 0))
                prefetch_to_read(address)
                prefetch_to_read(address + record_bytes - 1)
            places[i + 1] = 0
            if held[i] == 0:
                continue
            count += 1
            places[i + 1] = count
            target = memory + count * row_bytes
            if scattered:
                clear_row(target, num_values, zero)
            for k in range(num_chunks):
                number = load_one(numbers + 4 * (i * num_chunks + k), int32(0))
                address = record_at(pool, shift, record_bytes, max(number, 0))
                source = address if number >= 0 else nothing
                if not scattered:
                    copy_row(target + starts[k] * size, source, (starts[k + 1] - starts[k]) * size)
                    continue
                for j in range(starts[k], starts[k + 1]):
                    rows[count, stored_columns[table, j]] = load_one(source + (j - starts[k]) * size, zero)


@kernel
def pool_assembled(rows, places, inverse, offsets, columns, is_mean, weights, out, out_address):
    """Fill ``out[i, columns[f]:columns[f] + dim]`` with the pooled rows of each bag."""
    num_samples, dim = out.shape[0], rows.shape[1]
    zero, one = out.dtype.type(0), out.dtype.type(1)
    size = size_of(zero)
    memory, row_bytes, sample_bytes = data_address(rows), dim * size, out.shape[1] * size
    weighted = len(weights) > 0
    for block in range(0, num_samples, _POOLED_BLOCK):
        for feature in range(len(columns)):
            for sample in range(block, min(block + _POOLED_BLOCK, num_samples)):
                bag = feature * num_samples + sample
                begin, end = offsets[bag], offsets[bag + 1]
                target = out_address + sample * sample_bytes + columns[feature] * size
                for offset in range(0, row_bytes, _CACHE_LINE):
                    prefetch_to_write(target + _SAMPLES_AHEAD * sample_bytes + offset)
                if begin == end or weighted:
                    clear_row(target, dim, zero)
                for i in range(begin, end):
                    source = memory + places[inverse[i] + 1] * row_bytes
                    if i == begin and not weighted:
                        copy_row(target, source, row_bytes)
                    else:
                        add_row(target, source, dim, weights[i] if weighted else one)
                if is_mean[feature] and end - begin > 1:
                    for column in range(columns[feature], columns[feature] + dim):
                        out[sample, column] /= end - begin


@kernel
def sum_gradients(
    inverse, offsets, columns, feature_tables, table_starts, is_mean, weights, pooled_gradients,
    pooled_address, gradients,
):  # fmt: skip
    """Sum into each row the gradients of the bags that read it, in the order of features and samples.

    Rows are numbered in the order they first appear, table by table, so the first gradient of each is written
    over whatever was there. Where several features read a table, all samples are one block: sums must not
    depend on blocks.
    """
    num_samples, dim, num_features = pooled_gradients.shape[0], gradients.shape[1], len(columns)
    zero, one = gradients.dtype.type(0), gradients.dtype.type(1)
    size = size_of(zero)
    memory, row_bytes, sample_bytes = data_address(gradients), dim * size, pooled_gradients.shape[1] * size
    weighted = len(weights) > 0
    next_rows = table_starts[:-1].copy()  # of each table, the number of the row that appears next
    block_size = _SUMMED_BLOCK
    for feature in range(1, num_features):
        if feature_tables[feature] == feature_tables[feature - 1]:
            block_size = max(1, num_samples)
    for block in range(0, num_samples, block_size):
        for feature in range(num_features):
            next_row = next_rows[feature_tables[feature]]
            scaled = is_mean[feature] or weighted
            for sample in range(block, min(block + block_size, num_samples)):
                bag = feature * num_samples + sample
                begin, end = offsets[bag], offsets[bag + 1]
                source = pooled_address + sample * sample_bytes + columns[feature] * size
                for offset in range(0, row_bytes, _CACHE_LINE):
                    prefetch_to_read(source + _SAMPLES_AHEAD * sample_bytes + offset)
                for i in range(begin, end):
                    row = inverse[i]
                    is_first = row == next_row
                    next_row += is_first
                    if row < 0:
                        continue
                    target = memory + row * row_bytes
                    if is_first and not scaled:
                        copy_row(target, source, row_bytes)
                        continue
                    if is_first:
                        clear_row(target, dim, zero)
                    scale = weights[i] if weighted else one
                    if is_mean[feature]:
                        scale /= gradients.dtype.type(end - begin)
                    add_row(target, source, dim, scale)
            next_rows[feature_tables[feature]] = next_row
