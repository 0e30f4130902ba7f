"""Pooled reads straight from chunks, and the way back for gradients; bags as in `rowhaul.store.pooling`.

The chunk numbers of a batch's rows have been read from their entries into ``chunks`` by then, so that a row's
chunks can be asked for well before they are added. What is absent is zero: it costs no read.
"""

from __future__ import annotations

from rowhaul._kernels import kernel
from rowhaul._memory import data_address, prefetch_to_read, prefetch_to_write, record_at
from rowhaul._vectors import add_row, clear_row, copy_row, load_one, size_of

_IDS_AHEAD = 16
_SAMPLES_AHEAD = 8
_CACHE_LINE = 64


@kernel
def pool_chunks(
    addresses, shift, width, chunks, held, zeros, starts, stored_columns, scattered, feature_tables, inverse,
    offsets, columns, dim, is_mean, weights, out, out_address,
):  # fmt: skip
    """Fill ``out[i, columns[f]:columns[f] + dim]`` with the pooled rows of each bag.

    ``zeros`` are as wide as a chunk: one row is copied whole, absent chunks from there, without a branch on
    what is there, which no processor can guess.
    """
    num_samples, num_ids, num_chunks = out.shape[0], len(inverse), chunks.shape[1]
    zero, one = out.dtype.type(0), out.dtype.type(1)
    size = size_of(zero)
    pool, nothing, record_bytes = data_address(addresses), data_address(zeros), width * size
    sample_bytes = out.shape[1] * size
    weighted = len(weights) > 0
    num_asked = 0  # rows are numbered as they first appear: those before have been asked for
    for feature in range(len(columns)):
        table = feature_tables[feature]
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            begin, end = offsets[bag], offsets[bag + 1]
            target = out_address + sample * sample_bytes + columns[feature] * size
            for offset in range(0, dim * size, _CACHE_LINE):
                prefetch_to_write(target + _SAMPLES_AHEAD * sample_bytes + offset)
            if begin < end:
                soon = inverse[min(end + _IDS_AHEAD, num_ids) - 1]
                while num_asked <= soon:
                    for k in range(num_chunks if held[num_asked] else 0):
                        address = record_at(pool, shift, record_bytes, max(chunks[num_asked, k], 0))
                        prefetch_to_read(address)
                        prefetch_to_read(address + record_bytes - 1)
                    num_asked += 1
            if end - begin == 1 and not weighted and not scattered and held[inverse[begin]] > 0:
                for k in range(num_chunks):
                    number = chunks[inverse[begin], k]
                    address = record_at(pool, shift, record_bytes, max(number, 0))
                    source = address if number >= 0 else nothing
                    copy_row(target + starts[k] * size, source, (starts[k + 1] - starts[k]) * size)
                continue
            clear_row(target, dim, zero)
            for i in range(begin, end):
                row = inverse[i]
                factor = weights[i] if weighted else one
                for k in range(num_chunks if held[row] else 0):
                    number = chunks[row, k]
                    if number < 0:
                        continue
                    address = record_at(pool, shift, record_bytes, number)
                    if not scattered:
                        add_row(target + starts[k] * size, address, starts[k + 1] - starts[k], factor)
                        continue
                    for j in range(starts[k], starts[k + 1]):
                        value = load_one(address + (j - starts[k]) * size, zero)
                        out[sample, columns[feature] + stored_columns[table, j]] += factor * value
            if is_mean[feature] and end - begin > 1:
                for column in range(columns[feature], columns[feature] + dim):
                    out[sample, column] /= end - begin


@kernel
def sum_gradients(
    inverse, offsets, columns, is_mean, weights, entries, pooled_gradients, pooled_address, gradients
):
    """Sum into each row that has an entry the gradients of the bags that read it; others are left alone.

    Rows are numbered in the order they first appear, so the first gradient of each is written over whatever
    was there.
    """
    num_samples, dim = pooled_gradients.shape[0], gradients.shape[1]
    zero, one = gradients.dtype.type(0), gradients.dtype.type(1)
    size = size_of(zero)
    sample_bytes, row_bytes = pooled_gradients.shape[1] * size, dim * size
    weighted = len(weights) > 0
    num_seen = 0
    for feature in range(len(columns)):
        scaled = is_mean[feature] or weighted
        for sample in range(num_samples):
            bag = feature * num_samples + sample
            begin, end = offsets[bag], offsets[bag + 1]
            source = pooled_address + sample * sample_bytes + columns[feature] * size
            for offset in range(0, row_bytes, _CACHE_LINE):
                prefetch_to_read(source + _SAMPLES_AHEAD * sample_bytes + offset)
            for i in range(begin, end):
                row = inverse[i]
                is_first = row == num_seen
                num_seen += is_first
                if entries[row] < 0:
                    continue
                target = data_address(gradients) + row * row_bytes
                if is_first and not scaled:
                    copy_row(target, source, row_bytes)
                    continue
                if is_first:
                    clear_row(target, dim, zero)
                scale = weights[i] if weighted else one
                if is_mean[feature]:
                    scale /= gradients.dtype.type(end - begin)
                add_row(target, source, dim, scale)
