"""Compiled loops that turn rows into chunks, on their way to the scheduler and in a worker."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import memory_at, record_address


@kernel
def name_chunks(offsets, tables, keys, named, slots):
    """Replace ids of rows by ids of the chunks that are there of each, in the order of the ids.

    ``named`` is the row of each id, ``slots`` has -1 where a chunk of a row is not there.
    """
    num_chunks = slots.shape[1]
    held = np.zeros(len(slots), np.int64)
    for row in range(len(slots)):
        for k in range(num_chunks):
            held[row] += slots[row, k] >= 0
    total = 0
    for i in range(len(keys)):
        total += held[named[i]]
    chunk_offsets = np.empty(len(offsets), np.int64)
    chunk_tables, chunk_keys = np.empty(total, np.int32), np.empty(total, np.int64)
    count = 0
    chunk_offsets[0] = 0
    for sample in range(len(offsets) - 1):
        for i in range(offsets[sample], offsets[sample + 1]):
            if held[named[i]] > 0:
                for k in range(num_chunks):
                    if slots[named[i], k] >= 0:
                        chunk_tables[count] = tables[i] * num_chunks + k
                        chunk_keys[count] = keys[i]
                        count += 1
        chunk_offsets[sample + 1] = count
    return chunk_offsets, chunk_tables, chunk_keys


@kernel
def put_chunks(addresses, shift, width, locations, tables, columns, first, size, rows):
    """Copy the values of one chunk of each row to where they belong in the whole row; -1: it is not there.

    It is the values from ``first`` on of those that rows have; ``columns`` says where these are, by table.
    """
    for i in range(len(locations)):
        if locations[i] >= 0:
            address = record_address(addresses, shift, width * rows.itemsize, locations[i])
            record = memory_at(address, width, rows.dtype)
            for j in range(size):
                rows[i, columns[tables[i], first + j]] = record[j]


@kernel
def take_chunks(gradients, rows, tables, chunks, starts, columns, out):
    """The gradients of chunks: of each, the row that it is of, that row's table, and its place in it."""
    for i in range(len(rows)):
        if rows[i] >= 0:
            first = starts[chunks[i]]
            for j in range(out.shape[1]):
                out[i, j] = gradients[rows[i], columns[tables[i], first + j]]
