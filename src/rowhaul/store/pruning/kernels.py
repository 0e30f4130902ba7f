"""Compiled loops over pruned rows: reading, gradients of what is there, utilities, first values.

An entry is ``num_chunks`` chunk numbers (-1: pruned), as many utilities, and the step of the latest one, 4
bytes each. Chunks are records of the pool. Chunk ``k`` of a row holds its stored values
``starts[k]:starts[k + 1]``; stored value ``j`` is column ``columns[table, j]`` of the row, and the same
number where ``scattered`` is false.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int32, int64, uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import memory_at, prefetch_to_read, prefetch_to_write, record_address
from rowhaul.store.kernels import mix
from rowhaul.store.pruning.fields import load_float32, load_int32, store_float32, store_int32

ABSENT = -1
_ENTRIES_AHEAD = 16


@kernel
def read_chunk_numbers(addresses, shift, width, locations, chunks, held):
    """Chunk numbers of entries, and how many are there; of no entry (-1) they are all absent."""
    num_chunks, count, entry_bytes, low_bits = chunks.shape[1], len(locations), width * 4, (1 << shift) - 1
    for i in range(count):
        soon = locations[min(i + _ENTRIES_AHEAD, count - 1)]
        if soon >= 0:
            prefetch_to_read(addresses[soon >> shift] + (soon & low_bits) * entry_bytes)
        location, num_held = locations[i], 0
        if location < 0:
            for k in range(num_chunks):
                chunks[i, k] = ABSENT
            held[i] = 0
            continue
        address = addresses[location >> shift] + (location & low_bits) * entry_bytes
        for k in range(num_chunks):
            chunks[i, k] = load_int32(address + 4 * k)
            num_held += chunks[i, k] >= 0
        held[i] = num_held


@kernel
def take_present(chunks, held, table_starts, starts, columns, scattered, gradients, size, records, taken):
    """Collect the gradients of the chunks of ``size`` values that are there; returns how many they are."""
    count = 0
    for table in range(len(table_starts) - 1):
        for i in range(table_starts[table], table_starts[table + 1]):
            if not held[i]:
                continue
            for k in range(chunks.shape[1]):
                first = starts[k]
                if chunks[i, k] < 0 or starts[k + 1] - first != size:
                    continue
                records[count] = chunks[i, k]
                if not scattered:
                    for j in range(size):
                        taken[count, j] = gradients[i, first + j]
                else:
                    for j in range(size):
                        taken[count, j] = gradients[i, columns[table, first + j]]
                count += 1
    return count


@register_jitable
def _norm(gradients, i, first, end):
    """The norm of a part of a row's gradient; `update_utilities` does the same where it cannot call it."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = first + (end - first) // 4 * 4
    for j in range(first, whole, 4):
        w, x = float(gradients[i, j]), float(gradients[i, j + 1])
        y, z = float(gradients[i, j + 2]), float(gradients[i, j + 3])
        a, b, c, d = a + w * w, b + x * x, c + y * y, d + z * z
    total = (a + b) + (c + d)
    for j in range(whole, end):
        w = float(gradients[i, j])
        total += w * w
    return np.sqrt(total)


@kernel
def update_utilities(
    addresses, shift, width, locations, counts, table_starts, starts, columns, scattered, gradients,
    by_gradient, powers, now,
):  # fmt: skip
    """``u <- decay**steps * u + accesses * norm`` of every chunk, there or not.

    ``powers`` are those of the decay, see `decay_powers`. Squares are added up in double precision, in four
    running sums that are joined in a fixed order.
    """
    num_chunks, count, entry_bytes, low_bits = len(starts) - 1, len(locations), width * 4, (1 << shift) - 1
    for table in range(len(table_starts) - 1):
        for i in range(table_starts[table], table_starts[table + 1]):
            soon = locations[min(i + _ENTRIES_AHEAD, count - 1)]
            if soon >= 0:
                prefetch_to_write(addresses[soon >> shift] + (soon & low_bits) * entry_bytes)
                prefetch_to_write(
                    addresses[soon >> shift] + (soon & low_bits) * entry_bytes + entry_bytes - 1
                )
            location = locations[i]
            if location < 0:
                continue
            address = addresses[location >> shift] + (location & low_bits) * entry_bytes
            steps = now - load_int32(address + 8 * num_chunks)
            kept = powers[0, steps & 1023] * powers[1, min(steps >> 10, 1023)]
            store_int32(address + 8 * num_chunks, int32(now))
            for k in range(num_chunks):
                amount = float(counts[i])
                if by_gradient:
                    first, end = starts[k], starts[k + 1]
                    whole = first + (end - first) // 4 * 4
                    a, b, c, d = 0.0, 0.0, 0.0, 0.0
                    if not scattered:
                        for j in range(first, whole, 4):
                            w, x = float(gradients[i, j]), float(gradients[i, j + 1])
                            y, z = float(gradients[i, j + 2]), float(gradients[i, j + 3])
                            a, b, c, d = a + w * w, b + x * x, c + y * y, d + z * z
                    else:
                        for j in range(first, whole, 4):
                            w = float(gradients[i, columns[table, j]])
                            x = float(gradients[i, columns[table, j + 1]])
                            y = float(gradients[i, columns[table, j + 2]])
                            z = float(gradients[i, columns[table, j + 3]])
                            a, b, c, d = a + w * w, b + x * x, c + y * y, d + z * z
                    total = (a + b) + (c + d)
                    for j in range(whole, end):
                        w = float(gradients[i, columns[table, j]])
                        total += w * w
                    amount *= np.sqrt(total)
                place = address + 4 * (num_chunks + k)
                store_float32(place, float32(kept * float(load_float32(place)) + amount))


@kernel
def read_entries(addresses, shift, width, locations, powers, now, chunks, utilities):
    """Chunk numbers of entries, and their utilities as they are after step ``now``."""
    num_chunks, count, entry_bytes, low_bits = chunks.shape[1], len(locations), width * 4, (1 << shift) - 1
    for i in range(count):
        soon = locations[min(i + _ENTRIES_AHEAD, count - 1)]
        prefetch_to_read(addresses[soon >> shift] + (soon & low_bits) * entry_bytes)
        address = addresses[locations[i] >> shift] + (locations[i] & low_bits) * entry_bytes
        steps = now - load_int32(address + 8 * num_chunks)
        kept = powers[0, steps & 1023] * powers[1, min(steps >> 10, 1023)]
        for k in range(num_chunks):
            chunks[i, k] = load_int32(address + 4 * k)
            utilities[i, k] = kept * float(load_float32(address + 4 * (num_chunks + k)))


@kernel
def exchange_chunks(addresses, shift, width, locations, places, numbers):
    """Give one chunk of each entry a new number, and ``numbers`` its old one."""
    low_bits = (1 << shift) - 1
    for i in range(len(locations)):
        entry = addresses[locations[i] >> shift] + (locations[i] & low_bits) * width * 4
        before = load_int32(entry + 4 * places[i])
        store_int32(entry + 4 * places[i], numbers[i])
        numbers[i] = before


@register_jitable
def _initial_value(row_seed, column, low, step):
    """As `rowhaul.store.kernels.write_initial`: 24 bits a column, two columns a draw."""
    draw = mix(row_seed + uint64(column // 2 + 1) * uint64(0x9E3779B97F4A7C15))
    bits = draw >> uint64(40) if column % 2 == 0 else (draw >> uint64(8)) & uint64(0xFFFFFF)
    return low + step * float(bits)


@kernel
def write_initial_chunks(
    addresses, shift, width, records, tables, keys, places, starts, columns, seeds, lows, steps,
    state_widths, state,
):  # fmt: skip
    """First values and state of chunks: the values that the whole row would start with there."""
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
def sum_squares(table_starts, locations, gradients, sums):
    """Add the squares of every table's gradients, column by column, in the order of the rows."""
    for table in range(len(table_starts) - 1):
        for i in range(table_starts[table], table_starts[table + 1]):
            if locations[i] < 0:
                continue
            for j in range(gradients.shape[1]):
                sums[table, j] += float(gradients[i, j]) * float(gradients[i, j])


@register_jitable
def _rank(hashed, bits):
    """The length of the run of zeros that a hash has behind its first bits, and one."""
    rest = hashed << uint64(bits)
    rank = 1
    while rank <= 64 - bits and rest >> uint64(63) == 0:
        rest <<= uint64(1)
        rank += 1
    return rank


@kernel
def count_distinct(hashes, bits, registers):
    """Note hashes in a counter of ``2**bits`` registers: each keeps the longest run of zeros."""
    for i in range(len(hashes)):
        register = int64(hashes[i] >> uint64(64 - bits))
        registers[register] = max(registers[register], _rank(hashes[i], bits))


@kernel
def count_absent(keys, entries, table_starts, seeds, bits, registers):
    """How many keys have no entry; their hashes are noted as `count_distinct` does."""
    count = 0
    for table in range(len(table_starts) - 1):
        for i in range(table_starts[table], table_starts[table + 1]):
            if entries[i] < 0:
                hashed = mix(uint64(keys[i]) ^ seeds[table])
                register = int64(hashed >> uint64(64 - bits))
                registers[register] = max(registers[register], _rank(hashed, bits))
                count += 1
    return count
