"""Compiled loops over chunks that are records of their own: first values, and norms of gradients."""

from __future__ import annotations

import numpy as np
from numba import uint64

from rowhaul._kernels import kernel
from rowhaul._memory import memory_at, record_address
from rowhaul.store.kernels import mix
from rowhaul.store.pruning.kernels import _initial_value, _norm


@kernel
def write_initial_part(
    addresses, shift, width, records, keys, starts, which, seeds, lows, steps, firsts, dim, state
):
    """Make the records of parts of rows: `rowhaul.store.kernels.write_initial` from column ``firsts`` on."""
    table = 0
    for i in range(len(which)):
        while which[i] >= starts[table + 1]:
            table += 1
        address = record_address(addresses, shift, width * state.itemsize, records[i])
        record = memory_at(address, width, state.dtype)
        row_seed = mix(uint64(keys[which[i]]) ^ seeds[table])
        for k in range(dim):
            record[k] = _initial_value(row_seed, firsts[table] + k, lows[table], steps[table])
        for k in range(dim, width):
            record[k] = state[0]


@kernel
def chunk_norms(gradients, starts):
    """The norm of every row's gradient, chunk by chunk."""
    num_chunks = len(starts) - 1
    norms = np.empty((len(gradients), num_chunks), np.float64)
    for i in range(len(gradients)):
        for k in range(num_chunks):
            norms[i, k] = _norm(gradients, i, starts[k], starts[k + 1])
    return norms
