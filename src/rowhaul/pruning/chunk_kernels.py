"""Compiled loops over chunks as records: first values, gradients, lists of what is there."""

from __future__ import annotations

import math

import numpy as np
from numba import float64, uint64
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
def stored_gradients(tables, columns, gradients, out):
    """Copy those columns of each row's gradient that its table stores."""
    for i in range(len(tables)):
        for j in range(columns.shape[1]):
            out[i, j] = gradients[i, columns[tables[i], j]]


@kernel
def chunk_norms(gradients, tables, starts, columns):
    """The norm of every row's gradient, chunk by chunk, over the columns of its table that are kept.

    Added up as `rowhaul.pruning.deciding.entry_kernels.add_norms` does, in four sums, to the same bits.
    """
    num_chunks = len(starts) - 1
    norms = np.empty((len(gradients), num_chunks), np.float64)
    for i in range(len(gradients)):
        of_table = tables[i]
        for k in range(num_chunks):
            a, b, c, d = 0.0, 0.0, 0.0, 0.0
            whole = starts[k] + (starts[k + 1] - starts[k]) // 4 * 4
            for j in range(starts[k], whole, 4):
                w = float64(gradients[i, columns[of_table, j]])
                x = float64(gradients[i, columns[of_table, j + 1]])
                y = float64(gradients[i, columns[of_table, j + 2]])
                z = float64(gradients[i, columns[of_table, j + 3]])
                a, b, c, d = a + w * w, b + x * x, c + y * y, d + z * z
            total = (a + b) + (c + d)
            for j in range(whole, starts[k + 1]):
                number = float(gradients[i, columns[of_table, j]])
                total += number * number
            norms[i, k] = math.sqrt(total)
    return norms
