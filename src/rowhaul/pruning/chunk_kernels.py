"""Compiled loops over chunks: their ids, first values, gradients, and where they are in whole rows."""

from __future__ import annotations

import numpy as np
from numba import uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import memory_at, record_address
from rowhaul.store.records import mix


@register_jitable
def _initial_value(row_seed, column, low, step):
    """As `rowhaul.store.records.write_initial`: 24 bits a column, two columns a draw."""
    draw = mix(row_seed + uint64(column // 2 + 1) * uint64(0x9E3779B97F4A7C15))
    bits = draw >> uint64(40) if column % 2 == 0 else (draw >> uint64(8)) & uint64(0xFFFFFF)
    return low + step * float(bits)


@kernel
def write_initial_chunks(
    addresses, shift, width, records, tables, keys, places, starts, columns, seeds, lows, steps,
    state_widths, state,
):  # fmt: skip
    """Write first values and state of chunks: the values that the whole row would start with there."""
    for i in range(len(records)):
        table, first, end = tables[i], starts[places[i]], starts[places[i] + 1]
        address = record_address(addresses, shift, width * state.itemsize, records[i])
        record = memory_at(address, width, state.dtype)
        row_seed = mix(uint64(keys[i]) ^ seeds[table])
        for j in range(first, end):
            record[j - first] = _initial_value(row_seed, columns[table, j], lows[table], steps[table])
        for j in range(end - first, end - first + state_widths[places[i]]):
            record[j] = state[0]


@kernel
def list_present(slots, held, starts, size, num_values, records, firsts):
    """List the record and gradient of each chunk of ``size`` values that is there; returns how many.

    Gradients are ``num_values`` a row; ``firsts`` says where a chunk's begin. Both lists have room for one
    more, since every chunk is noted and those that are absent are overwritten.
    """
    num_chunks, count = slots.shape[1], 0
    is_even = starts[-1] == size * num_chunks
    for i in range(len(slots)):
        if is_even and held[i] == num_chunks:  # most rows that hold any are whole
            for k in range(num_chunks):
                records[count + k] = slots[i, k]
                firsts[count + k] = i * num_values + k * size
            count += num_chunks
            continue
        for k in range(num_chunks if held[i] else 0):
            if starts[k + 1] - starts[k] == size:
                records[count] = slots[i, k]
                firsts[count] = i * num_values + starts[k]
                count += slots[i, k] >= 0
    return count


@kernel
def stored_gradients(tables, columns, gradients):
    """Return those columns of each row's gradient that its table stores."""
    out = np.empty((len(tables), columns.shape[1]), gradients.dtype)
    for i in range(len(tables)):
        for j in range(columns.shape[1]):
            out[i, j] = gradients[i, columns[tables[i], j]]
    return out


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
