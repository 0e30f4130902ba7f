"""Loops over records: initial values, reading, writing; and the hash of keys.

All loops visit keys in the order given, so results never depend on threads or on the machine.
"""

from __future__ import annotations

from numba import uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import copy_bytes, memory_at, prefetch_to_read, record_address

_RECORDS_AHEAD = 16  # how far ahead of its use a record is asked for


@register_jitable
def mix(x):
    """A bijective 64-bit mixer (splitmix64's finaliser): every input bit reaches every output bit."""
    x = uint64(x)
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@register_jitable
def initial_values(values, dim, row_seed, low, step):
    """Fill in the initial values of a row: a function of the row's seed and the column.

    ``low + step * k`` with ``k`` a 24-bit integer from a counter-based generator, two to a 64-bit draw. The
    arithmetic is exact or correctly rounded, so every CPU gets the same bits.
    """
    for k in range(0, dim, 2):
        draw = mix(row_seed + uint64(k // 2 + 1) * uint64(0x9E3779B97F4A7C15))
        values[k] = low + step * float(draw >> uint64(40))
        if k + 1 < dim:
            values[k + 1] = low + step * float((draw >> uint64(8)) & uint64(0xFFFFFF))


@kernel
def write_initial(addresses, shift, width, records, keys, starts, which, seeds, lows, steps, dim, state):
    """Make the records of rows that were never trained; ``which[i]`` is the key of ``records[i]``.

    Values are a function of (seed, table, key, column) alone: see `initial_values`. The rest of the record is
    filled with ``state``, whose type is the records'.
    """
    table = 0
    for i in range(len(which)):
        while which[i] >= starts[table + 1]:
            table += 1
        address = record_address(addresses, shift, width * state.itemsize, records[i])
        record = memory_at(address, width, state.dtype)
        row_seed = mix(uint64(keys[which[i]]) ^ seeds[table])
        initial_values(record, dim, row_seed, lows[table], steps[table])
        for k in range(dim, width):
            record[k] = state[0]


@kernel
def read_records(addresses, shift, records, out):
    """Copy records into the rows of ``out``."""
    width = out.shape[1]
    for i in range(len(records)):
        address = record_address(addresses, shift, width * out.itemsize, records[i])
        record = memory_at(address, width, out.dtype)
        for k in range(width):
            out[i, k] = record[k]


@kernel
def write_records(addresses, shift, records, contents):
    """Copy the rows of ``contents`` into records."""
    width = contents.shape[1]
    for i in range(len(records)):
        address = record_address(addresses, shift, width * contents.itemsize, records[i])
        record = memory_at(address, width, contents.dtype)
        for k in range(width):
            record[k] = contents[i, k]


@kernel
def gather_bytes(addresses, shift, record_bytes, records, lengths, offsets, out_address):
    """Copy the first ``lengths[i]`` bytes of each record to ``offsets[i]`` from an address on."""
    last = len(records) - 1
    for i in range(len(records)):
        soon = records[min(i + _RECORDS_AHEAD, last)]
        prefetch_to_read(record_address(addresses, shift, record_bytes, soon))
        address = record_address(addresses, shift, record_bytes, records[i])
        copy_bytes(out_address + offsets[i], address, lengths[i])


@kernel
def scatter_bytes(addresses, shift, record_bytes, records, lengths, offsets, in_address):
    """The way back: overwrite the first ``lengths[i]`` bytes of each record."""
    for i in range(len(records)):
        address = record_address(addresses, shift, record_bytes, records[i])
        copy_bytes(address, in_address + offsets[i], lengths[i])
