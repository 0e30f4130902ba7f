"""Pooled reads of rows straight from their records, and the way back for gradients.

Bag ``f * num_samples + i`` holds the ids of sample ``i`` for feature ``f``: entries
``offsets[bag]:offsets[bag + 1]`` of ``inverse``, which points at the batch's distinct rows. Sums run
in the order of the samples, so a result does not depend on threads or on the rest of the batch.

A negative location ``-1 - k`` means row ``k`` of the spare rows: one that is not stored.
"""

from __future__ import annotations

from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import copy_bytes, memory_at, prefetch_to_read, prefetch_to_write, record_address

# How far ahead of their use rows and vectors are asked for: some hundred nanoseconds of work.
_IDS_AHEAD = 16
_SAMPLES_AHEAD = 8


@register_jitable
def _row_address(addresses, shift, record_bytes, location, spare_address, row_bytes):
    if location >= 0:
        return record_address(addresses, shift, record_bytes, location)
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
    size = out.itemsize
    sample_bytes = out.shape[1] * size
    weighted = len(weights) > 0
    for feature in range(len(columns)):
        first = columns[feature]
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            begin, end = offsets[bag], offsets[bag + 1]
            target = out_address + sample * sample_bytes + first * size
            prefetch_to_write(target + _SAMPLES_AHEAD * sample_bytes)
            if begin == end:
                for k in range(dim):
                    out[sample, first + k] = 0
            for i in range(begin, end):
                soon = locations[inverse[min(i + _IDS_AHEAD, num_ids - 1)]]
                prefetch_to_read(
                    _row_address(addresses, shift, width * size, soon, spare_address, dim * size)
                )
                location = locations[inverse[i]]
                address = _row_address(addresses, shift, width * size, location, spare_address, dim * size)
                if i == begin and not weighted:
                    copy_bytes(target, address, dim * size)
                    continue
                row = memory_at(address, dim, out.dtype)
                if not weighted:
                    for k in range(dim):
                        out[sample, first + k] += row[k]
                else:
                    for k in range(dim):
                        before = out[sample, first + k] if i > begin else out.dtype.type(0)
                        out[sample, first + k] = before + weights[i] * row[k]
            if is_mean[feature] and end - begin > 1:
                for k in range(dim):
                    out[sample, first + k] /= end - begin


@kernel
def sum_row_gradients(
    inverse, offsets, columns, is_mean, weights, pooled_gradients, pooled_address, row_gradients
):
    """Sum into each row the gradients of the bags that read it."""
    num_samples = pooled_gradients.shape[0]
    size = pooled_gradients.itemsize
    sample_bytes = pooled_gradients.shape[1] * size
    dim = row_gradients.shape[1]
    one = row_gradients.dtype.type(1)
    row_gradients[:] = 0
    for feature in range(len(columns)):
        first = columns[feature]
        scaled = is_mean[feature] or len(weights) > 0
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            begin, end = offsets[bag], offsets[bag + 1]
            prefetch_to_read(pooled_address + (sample + _SAMPLES_AHEAD) * sample_bytes + first * size)
            for i in range(begin, end):
                row = inverse[i]
                if not scaled:
                    for k in range(dim):
                        row_gradients[row, k] += pooled_gradients[sample, first + k]
                else:
                    scale = weights[i] if len(weights) > 0 else one
                    if is_mean[feature]:
                        scale /= row_gradients.dtype.type(end - begin)
                    for k in range(dim):
                        row_gradients[row, k] += scale * pooled_gradients[sample, first + k]


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
    size = out.itemsize
    for feature in range(len(columns)):
        first = columns[feature]
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            begin, end = offsets[bag], offsets[bag + 1]
            for i in range(begin, end):
                location = locations[inverse[i]]
                address = _row_address(addresses, shift, width * size, location, spare_address, dim * size)
                row = memory_at(address, dim, out.dtype)
                total = out.dtype.type(0)
                for k in range(dim):
                    total += row[k] * pooled_gradients[sample, first + k]
                out[i] = total / (end - begin) if is_mean[feature] else total
