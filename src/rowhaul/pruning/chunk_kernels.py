"""Compiled loops over chunks that are records of their own: first values, and norms of gradients."""

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
def write_initial_part(
    addresses, shift, width, records, keys, starts, which, seeds, lows, steps, columns, dim, state
):
    """Make the records of parts of rows: `rowhaul.store.records.write_initial` of some columns."""
    table = 0
    for i in range(len(which)):
        while which[i] >= starts[table + 1]:
            table += 1
        address = record_address(addresses, shift, width * state.itemsize, records[i])
        record = memory_at(address, width, state.dtype)
        row_seed = mix(uint64(keys[which[i]]) ^ seeds[table])
        for k in range(dim):
            record[k] = _initial_value(row_seed, columns[table, k], lows[table], steps[table])
        for k in range(dim, width):
            record[k] = state[0]


@kernel
def chunk_norms(gradients, tables, starts, columns):
    """The norm of every row's gradient, chunk by chunk, over the columns of its table that are kept.

    Added up as `rowhaul.pruning.pool.entry_kernels.update_utilities` does, in four sums, to the same bits.
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


@kernel
def add_squares(gradients, tables, rows, sums):
    """Add the squares of some rows' gradients to those of their tables, column by column."""
    for i in rows:
        for j in range(gradients.shape[1]):
            sums[tables[i], j] += float(gradients[i, j]) * float(gradients[i, j])
