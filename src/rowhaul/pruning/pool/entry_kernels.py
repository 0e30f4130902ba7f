"""Compiled loops over pruned rows: entries, lists of what is there, utilities, first values, counts.

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
from rowhaul._memory import (
    data_address,
    leading_zeros,
    memory_at,
    prefetch_to_read,
    prefetch_to_write,
    record_address,
    record_at,
)
from rowhaul._vectors import (
    copy_row,
    four_times,
    joined,
    joined_each,
    load_four,
    load_one,
    narrowed,
    root,
    size_of,
    store_four,
    widened,
)
from rowhaul.pruning.pool.fields import load_float32, load_int32, store_float32, store_int32
from rowhaul.store.records import mix

ABSENT = -1
_ENTRIES_AHEAD = 16


@kernel
def keep_known(keys, starts, entries, inverse, known_keys, known_starts, known_entries, rows, counts):
    """Of the distinct keys of a batch, given table by table, keep those that have an entry, in their order.

    ``rows`` gets the number that each id's key has among these, -1 without an entry. ``counts``, zeros and
    one more than keys, gets how often each is read, behind a first number that is for all the others. Returns
    how many are kept. Without branches on what is there, which no processor can guess.
    """
    numbers = np.empty(len(keys), np.int32)
    count = 0
    for table in range(len(starts) - 1):
        known_starts[table] = count
        for i in range(starts[table], starts[table + 1]):
            is_known = int64(entries[i] >= 0)
            known_keys[count] = keys[i]
            known_entries[count] = entries[i]
            numbers[i] = count if is_known else -1
            count += is_known
    known_starts[-1] = count
    for i in range(len(inverse)):
        row = numbers[inverse[i]]
        rows[i] = row
        counts[row + 1] += 1
    return count


@kernel
def read_chunk_numbers(addresses, shift, width, entries, chunks, held):
    """Chunk numbers of entries, and how many of them are there."""
    num_chunks, count, entry_bytes = chunks.shape[1], len(entries), width * 4
    memory, target = data_address(addresses), data_address(chunks)
    for i in range(count):
        prefetch_to_read(record_at(memory, shift, entry_bytes, entries[min(i + _ENTRIES_AHEAD, count - 1)]))
        source = record_at(memory, shift, entry_bytes, entries[i])
        copy_row(target + i * num_chunks * 4, source, num_chunks * 4)
        num_held = 0
        for k in range(num_chunks):
            num_held += load_int32(source + 4 * k) >= 0
        held[i] = num_held


@kernel
def count_reads(inverse, counts):
    """Add to each row's count how often it is read."""
    for i in range(len(inverse)):
        counts[inverse[i]] += 1


@kernel
def list_present(chunks, held, starts, size, num_values, records, firsts):
    """Number and gradient of each chunk of ``size`` values that is there; returns how many they are.

    Gradients are ``num_values`` a row; ``firsts`` says where a chunk's begin. Both lists have room for one
    more, since every chunk is noted and those that are absent are overwritten.
    """
    num_chunks, count = chunks.shape[1], 0
    is_even = starts[-1] == size * num_chunks
    for i in range(len(chunks)):
        if is_even and held[i] == num_chunks:  # most rows that hold any are whole
            for k in range(num_chunks):
                records[count + k] = chunks[i, k]
                firsts[count + k] = i * num_values + k * size
            count += num_chunks
            continue
        for k in range(num_chunks if held[i] else 0):
            if starts[k + 1] - starts[k] == size:
                records[count] = chunks[i, k]
                firsts[count] = i * num_values + starts[k]
                count += chunks[i, k] >= 0
    return count


@kernel
def stored_gradients(table_starts, columns, gradients, out):
    """Those columns of each row's gradient that its table stores."""
    for table in range(len(table_starts) - 1):
        for i in range(table_starts[table], table_starts[table + 1]):
            for j in range(columns.shape[1]):
                out[i, j] = gradients[i, columns[table, j]]


@register_jitable
def _squares(gradient, num_bytes, size, zero):
    """Four running sums of the squares of a part of a gradient, in double precision."""
    sums = four_times(0.0)
    for at in range(0, num_bytes, 4 * size):
        four = widened(load_four(gradient + at, zero))
        sums = sums + four * four
    return sums


@register_jitable
def _norm(gradient, num_values, size, zero):
    """The norm of a part of a gradient."""
    whole = num_values // 4 * 4 * size
    total = joined(_squares(gradient, whole, size, zero))
    for at in range(whole, num_values * size, size):
        one = float(load_one(gradient + at, zero))
        total += one * one
    return np.sqrt(total)


@kernel
def update_utilities(
    addresses, shift, width, locations, counts, starts, gradients, by_gradient, powers, now
):  # fmt: skip
    """``u <- decay**steps * u + accesses * norm`` of every chunk of entries, there or not.

    ``gradients`` are of stored values; ``powers`` are those of the decay, see `decay_powers`. Squares are
    added up in double precision, in four running sums that are joined in a fixed order. Chunks are mostly
    small, so that most of the time goes into what comes after that: joining the sums, a root, the decay. If
    chunks are of one size, these are done for four at once; a lane is rounded as a single number would be.
    """
    num_chunks, count, entry_bytes = len(starts) - 1, len(locations), width * 4
    entries, zero = data_address(addresses), gradients.dtype.type(0)
    size = size_of(zero)
    chunk_values = starts[1] - starts[0]
    chunk_bytes, row_bytes = chunk_values * size, gradients.shape[1] * size
    in_fours = 0  # chunks done four at a time
    if by_gradient and chunk_values % 4 == 0 and starts[-1] == num_chunks * chunk_values:
        in_fours = num_chunks - num_chunks % 4
    for i in range(count):
        soon = record_at(entries, shift, entry_bytes, locations[min(i + _ENTRIES_AHEAD, count - 1)])
        prefetch_to_write(soon)
        prefetch_to_write(soon + entry_bytes - 1)
        address = record_at(entries, shift, entry_bytes, locations[i])
        gradient = data_address(gradients) + i * row_bytes
        steps = now - load_int32(address + 8 * num_chunks)
        kept = powers[0, steps & 1023] * powers[1, min(steps >> 10, 1023)]
        store_int32(address + 8 * num_chunks, int32(now))
        accesses = float(counts[i])
        for k in range(0, in_fours, 4):
            part, place = gradient + k * chunk_bytes, address + 4 * (num_chunks + k)
            norms = root(
                joined_each(
                    _squares(part, chunk_bytes, size, zero),
                    _squares(part + chunk_bytes, chunk_bytes, size, zero),
                    _squares(part + 2 * chunk_bytes, chunk_bytes, size, zero),
                    _squares(part + 3 * chunk_bytes, chunk_bytes, size, zero),
                )
            )
            before = widened(load_four(place, float32(0)))
            store_four(place, narrowed(four_times(kept) * before + four_times(accesses) * norms))
        for k in range(in_fours, num_chunks):
            amount = accesses
            if by_gradient:
                amount *= _norm(gradient + starts[k] * size, starts[k + 1] - starts[k], size, zero)
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
    """As `rowhaul.store.records.write_initial`: 24 bits a column, two columns a draw."""
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
def sum_squares(table_starts, gradients, sums):
    """Add the squares of every table's gradients, column by column, in the order of the rows."""
    for table in range(len(table_starts) - 1):
        for i in range(table_starts[table], table_starts[table + 1]):
            for j in range(gradients.shape[1]):
                sums[table, j] += float(gradients[i, j]) * float(gradients[i, j])


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
    """How many keys have no entry; their hashes are noted as `count_distinct` does."""
    count = 0
    for table in range(len(table_starts) - 1):
        for i in range(table_starts[table], table_starts[table + 1]):
            is_absent = int64(entries[i] < 0)
            hashed = mix(uint64(keys[i]) ^ seeds[table])
            register = int64(hashed >> uint64(64 - bits))
            registers[register] = max(registers[register], is_absent * _rank(hashed, bits))
            count += is_absent
    return count
