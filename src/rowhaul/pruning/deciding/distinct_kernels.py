"""Compiled loops of the counter of different rows."""

from __future__ import annotations

from numba import int64, uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import leading_zeros
from rowhaul.store.records import mix


@register_jitable
def _rank(hashed, bits):
    """The length of the run of zeros that a hash has behind its first bits, and one."""
    return min(leading_zeros(hashed << uint64(bits)), 64 - bits) + 1


@kernel
def count_distinct(hashes, bits, registers):
    """Note hashes in a counter of ``2**bits`` registers: each keeps the longest run of zeros."""
    for i in range(len(hashes)):
        register = int64(hashes[i] >> uint64(64 - bits))
        registers[register] = max(registers[register], _rank(hashes[i], bits))


@kernel
def count_ranks(registers, by_rank):
    """Add to ``by_rank`` how many registers hold each rank."""
    for i in range(len(registers)):
        by_rank[registers[i]] += 1


@kernel
def count_absent(keys, entries, table_starts, seeds, bits, registers):
    """Count the keys that have no entry, and note their hashes as `count_distinct` does."""
    count = 0
    for table in range(len(table_starts) - 1):
        for i in range(table_starts[table], table_starts[table + 1]):
            is_absent = int64(entries[i] < 0)
            hashed = mix(uint64(keys[i]) ^ seeds[table])
            register = int64(hashed >> uint64(64 - bits))
            registers[register] = max(registers[register], is_absent * _rank(hashed, bits))
            count += is_absent
    return count
