"""Pooled reads of rows straight from their records, and the way back for gradients.

Bag ``f * num_samples + i`` holds the ids of sample ``i`` for feature ``f``: entries
``offsets[bag]:offsets[bag + 1]`` of ``inverse``, which points at the batch's distinct rows. Sums run
in the order of the samples, so a result does not depend on threads or on the rest of the batch.

A negative location ``-1 - k`` means row ``k`` of the spare rows: one that is not stored.
"""

from __future__ import annotations

from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import data_address, memory_at, prefetch_to_read, prefetch_to_write, record_at
from rowhaul._vectors import add_row, clear_row, copy_row, size_of

# How far ahead of their use rows and vectors are asked for: some hundred nanoseconds of work.
_IDS_AHEAD = 16
_SAMPLES_AHEAD = 8
_CACHE_LINE = 64


@register_jitable
def _row_address(chunks, shift, record_bytes, location, spare_address, row_bytes):
    if location >= 0:
        return record_at(chunks, shift, record_bytes, location)
    return spare_address + (-1 - location) * row_bytes


@kernel
def pool_rows(
    addresses, shift, width, locations, spare_address, inverse, offsets, columns, dim, is_mean, weights,
    out, out_address,
):  # fmt: skip
    """Fill ``out[i, columns[f]:columns[f] + dim]`` with the pooled rows of each bag.

    ``weights`` has one entry an id, or none at all.
    """
    num_samples, num_ids = out.shape[0], len(inverse)
    zero, one = out.dtype.type(0), out.dtype.type(1)
    size = size_of(zero)
    chunks, record_bytes, row_bytes = data_address(addresses), width * size, dim * size
    sample_bytes = out.shape[1] * size
    weighted = len(weights) > 0
    for feature in range(len(columns)):
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            begin, end = offsets[bag], offsets[bag + 1]
            target = out_address + sample * sample_bytes + columns[feature] * size
            for offset in range(0, row_bytes, _CACHE_LINE):
                prefetch_to_write(target + _SAMPLES_AHEAD * sample_bytes + offset)
            if begin == end or weighted:
                clear_row(target, dim, zero)
            for i in range(begin, end):
                soon = locations[inverse[min(i + _IDS_AHEAD, num_ids - 1)]]
                address = _row_address(chunks, shift, record_bytes, soon, spare_address, row_bytes)
                for offset in range(0, row_bytes, _CACHE_LINE):
                    prefetch_to_read(address + offset)
                prefetch_to_read(address + row_bytes - 1)
                location = locations[inverse[i]]
                address = _row_address(chunks, shift, record_bytes, location, spare_address, row_bytes)
                if i == begin and not weighted:
                    copy_row(target, address, row_bytes)
                else:
                    add_row(target, address, dim, weights[i] if weighted else one)
            if is_mean[feature] and end - begin > 1:
                for column in range(columns[feature], columns[feature] + dim):
                    out[sample, column] /= end - begin


@kernel
def sum_row_gradients(
    inverse, offsets, columns, is_mean, weights, pooled_gradients, pooled_address, row_gradients
):
    """Sum into each row the gradients of the bags that read it."""
    num_samples, dim = pooled_gradients.shape[0], row_gradients.shape[1]
    zero, one = row_gradients.dtype.type(0), row_gradients.dtype.type(1)
    size = size_of(zero)
    sample_bytes, row_bytes = pooled_gradients.shape[1] * size, dim * size
    gradients = data_address(row_gradients)
    weighted = len(weights) > 0
    num_begun = 0  # rows are numbered as they first appear: those before have something to add to
    for feature in range(len(columns)):
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            begin, end = offsets[bag], offsets[bag + 1]
            source = pooled_address + sample * sample_bytes + columns[feature] * size
            for offset in range(0, row_bytes, _CACHE_LINE):
                prefetch_to_read(source + _SAMPLES_AHEAD * sample_bytes + offset)
            for i in range(begin, end):
                target = gradients + inverse[i] * row_bytes
                while num_begun <= inverse[i]:
                    clear_row(gradients + num_begun * row_bytes, dim, zero)
                    num_begun += 1
                scale = weights[i] if weighted else one
                if is_mean[feature]:
                    scale /= row_gradients.dtype.type(end - begin)
                add_row(target, source, dim, scale)
    for row in range(num_begun, len(row_gradients)):
        clear_row(gradients + row * row_bytes, dim, zero)


@kernel
def sum_weight_gradients(
    addresses,
    shift,
    width,
    locations,
    spare_address,
    inverse,
    offsets,
    columns,
    dim,
    is_mean,
    pooled_gradients,
    out,
):
    """Gradient of each id's weight: the dot product of its row and its bag's gradient."""
    num_samples = pooled_gradients.shape[0]
    size, chunks = out.itemsize, data_address(addresses)
    for feature in range(len(columns)):
        first = columns[feature]
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            begin, end = offsets[bag], offsets[bag + 1]
            for i in range(begin, end):
                location = locations[inverse[i]]
                address = _row_address(chunks, shift, width * size, location, spare_address, dim * size)
                row = memory_at(address, dim, out.dtype)
                total = out.dtype.type(0)
                for k in range(dim):
                    total += row[k] * pooled_gradients[sample, first + k]
                out[i] = total / (end - begin) if is_mean[feature] else total
