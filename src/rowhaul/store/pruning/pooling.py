"""Pooled reads straight from chunks, and the way back for gradients; bags as in `rowhaul.store.pooling`.

The chunk numbers of a batch's rows have been read from their entries into ``chunks`` by then, so that a row's
chunks can be asked for well before they are added. What is absent is zero: it costs no read.
"""

from __future__ import annotations

from rowhaul._kernels import kernel
from rowhaul._memory import copy_bytes, memory_at, prefetch_to_read, prefetch_to_write

_IDS_AHEAD = 16
_SAMPLES_AHEAD = 8
_CACHE_LINE = 64


@kernel
def pool_chunks(
    addresses, shift, width, chunks, held, starts, stored_columns, scattered, feature_tables, inverse,
    offsets, columns, dim, is_mean, weights, out, out_address,
):  # fmt: skip
    """Fill ``out[i, columns[f]:columns[f] + dim]`` with the pooled rows of each bag."""
    num_samples, num_ids, num_chunks = out.shape[0], len(inverse), chunks.shape[1]
    size, low_bits = out.itemsize, (1 << shift) - 1
    record_bytes, sample_bytes = width * size, out.shape[1] * size
    weighted = len(weights) > 0
    for feature in range(len(columns)):
        first, table = columns[feature], feature_tables[feature]
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            begin, end = offsets[bag], offsets[bag + 1]
            target = out_address + sample * sample_bytes + first * size
            for offset in range(0, dim * size, _CACHE_LINE):
                prefetch_to_write(target + _SAMPLES_AHEAD * sample_bytes + offset)
            # One row that holds something, as it is: its chunks are copied and what lies between is cleared.
            plain = end - begin == 1 and not weighted and not scattered and held[inverse[begin]] > 0
            if not plain:
                for k in range(dim):
                    out[sample, first + k] = 0
            for i in range(begin, end):
                soon = inverse[min(i + _IDS_AHEAD, num_ids - 1)]
                for k in range(num_chunks if held[soon] else 0):
                    number = chunks[soon, k]
                    if number >= 0:
                        address = addresses[number >> shift] + (number & low_bits) * record_bytes
                        prefetch_to_read(address)
                        prefetch_to_read(address + record_bytes - 1)
                row = inverse[i]
                if not held[row]:
                    continue
                for k in range(num_chunks):
                    start, stop, number = starts[k], starts[k + 1], chunks[row, k]
                    if number < 0:
                        if plain:
                            for j in range(start, stop):
                                out[sample, first + j] = 0
                        continue
                    address = addresses[number >> shift] + (number & low_bits) * record_bytes
                    if plain:
                        copy_bytes(target + start * size, address, (stop - start) * size)
                        continue
                    record = memory_at(address, width, out.dtype)
                    factor = weights[i] if weighted else out.dtype.type(1)
                    if scattered:
                        for j in range(start, stop):
                            out[sample, first + stored_columns[table, j]] += factor * record[j - start]
                    else:
                        for j in range(start, stop):
                            out[sample, first + j] += factor * record[j - start]
            if is_mean[feature] and end - begin > 1:
                for k in range(dim):
                    out[sample, first + k] /= end - begin


@kernel
def sum_gradients(
    inverse, offsets, columns, is_mean, weights, entries, pooled_gradients, pooled_address, gradients,
    gradients_address,
):  # fmt: skip
    """Sum into each row that has an entry the gradients of the bags that read it; others are left alone.

    Rows are numbered in the order they first appear, so the first gradient of each is written over whatever
    was there.
    """
    num_samples, size = pooled_gradients.shape[0], pooled_gradients.itemsize
    sample_bytes, dim = pooled_gradients.shape[1] * size, gradients.shape[1]
    one = gradients.dtype.type(1)
    num_seen = 0
    for feature in range(len(columns)):
        first = columns[feature]
        scaled = is_mean[feature] or len(weights) > 0
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            begin, end = offsets[bag], offsets[bag + 1]
            source = pooled_address + sample * sample_bytes + first * size
            for offset in range(0, dim * size, _CACHE_LINE):
                prefetch_to_read(source + _SAMPLES_AHEAD * sample_bytes + offset)
            for i in range(begin, end):
                row = inverse[i]
                is_first = row == num_seen
                if is_first:
                    num_seen += 1
                if entries[row] < 0:
                    continue
                if not scaled:
                    if is_first:
                        copy_bytes(gradients_address + row * dim * size, source, dim * size)
                    else:
                        for k in range(dim):
                            gradients[row, k] += pooled_gradients[sample, first + k]
                    continue
                scale = weights[i] if len(weights) > 0 else one
                if is_mean[feature]:
                    scale /= gradients.dtype.type(end - begin)
                if is_first:
                    for k in range(dim):
                        gradients[row, k] = 0
                for k in range(dim):
                    gradients[row, k] += scale * pooled_gradients[sample, first + k]
