"""Compiled loops over chunks that are records of their own: first values, and norms of gradients."""

from __future__ import annotations

import math

import numpy as np
from numba import uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import memory_at, record_address
from rowhaul.store.kernels import mix


@register_jitable
def _initial_value(row_seed, column, low, step):
    """As `rowhaul.store.kernels.write_initial`: 24 bits a column, two columns a draw."""
    draw = mix(row_seed + uint64(column // 2 + 1) * uint64(0x9E3779B97F4A7C15))
    bits = draw >> uint64(40) if column % 2 == 0 else (draw >> uint64(8)) & uint64(0xFFFFFF)
    return low + step * float(bits)


@kernel
def write_initial_part(
    addresses, shift, width, records, keys, starts, which, seeds, lows, steps, columns, dim, state
):
    """Make the records of parts of rows: `rowhaul.store.kernels.write_initial` of some columns."""
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
    """The norm of every row's gradient, chunk by chunk, over the columns of its table that are kept."""
    num_chunks = len(starts) - 1
    norms = np.empty((len(gradients), num_chunks), np.float64)
    for i in range(len(gradients)):
        for k in range(num_chunks):
            total = 0.0
            for j in range(starts[k], starts[k + 1]):
                number = float(gradients[i, columns[tables[i], j]])
                total += number * number
            norms[i, k] = math.sqrt(total)
    return norms


@kernel
def add_squares(gradients, tables, rows, sums):
    """Add the squares of some rows' gradients to those of their tables, column by column."""
    for i in rows:
        for j in range(gradients.shape[1]):
            sums[tables[i], j] += float(gradients[i, j]) * float(gradients[i, j])
