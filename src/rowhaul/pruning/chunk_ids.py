"""Compiled loops that turn rows into chunks, on their way to the scheduler and in a worker."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import memory_at, record_address
from rowhaul.schedule.topology import row_hash


@kernel
def count_rows(tables, keys, num_tables):
    """The distinct rows of ids, table by table, each table's in the order they first appear.

    Returns the row of every id; keys of rows; where each table begins; how many ids name each row.
    """
    num_ids = len(keys)
    size = 16
    while size < 2 * num_ids:
        size *= 2
    slots = np.zeros(size, np.int32)
    first = np.empty(num_ids, np.int32)  # rows by appearance: the id that names each first
    named = np.empty(num_ids, np.int32)  # ids: the row, by appearance
    appearances = np.zeros(num_ids, np.int32)
    count = 0
    for i in range(num_ids):
        slot = np.int64(row_hash(tables[i], keys[i])) & (size - 1)
        row = slots[slot] - 1
        while row >= 0 and (keys[first[row]] != keys[i] or tables[first[row]] != tables[i]):
            slot = (slot + 1) & (size - 1)
            row = slots[slot] - 1
        if row < 0:
            row = count
            slots[slot] = row + 1
            first[row] = i
            count += 1
        named[i] = row
        appearances[row] += 1
    starts = np.zeros(num_tables + 1, np.int64)
    for row in range(count):
        starts[tables[first[row]] + 1] += 1
    for table in range(num_tables):
        starts[table + 1] += starts[table]
    following = starts.copy()
    place = np.empty(count, np.int32)
    row_keys, counts = np.empty(count, np.int64), np.empty(count, np.int32)
    for row in range(count):
        table = tables[first[row]]
        at = following[table]
        following[table] += 1
        place[row] = at
        row_keys[at], counts[at] = keys[first[row]], appearances[row]
    for i in range(num_ids):
        named[i] = place[named[i]]
    return named, row_keys, starts, counts


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


@kernel
def match_rows(tables, keys, wanted_tables, wanted_keys):
    """Where rows are among others, all different; -1 where they are not."""
    size = 16
    while size < 2 * len(keys):
        size *= 2
    slots = np.zeros(size, np.int32)
    for r in range(len(keys)):
        slot = np.int64(row_hash(tables[r], keys[r])) & (size - 1)
        while slots[slot] != 0:
            slot = (slot + 1) & (size - 1)
        slots[slot] = r + 1
    places = np.empty(len(wanted_keys), np.int64)
    for i in range(len(wanted_keys)):
        slot = np.int64(row_hash(wanted_tables[i], wanted_keys[i])) & (size - 1)
        row = slots[slot] - 1
        while row >= 0 and (keys[row] != wanted_keys[i] or tables[row] != wanted_tables[i]):
            slot = (slot + 1) & (size - 1)
            row = slots[slot] - 1
        places[i] = row
    return places
