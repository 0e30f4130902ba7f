"""Compiled loops over entries of the map.

An entry is words of 4 bytes: a slot for each chunk of the row (-1: pruned), utilities, and the step of the
latest of these. Utilities are one count of accesses for the row, or a sum of gradient norms for each chunk.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int32, int64, uint32, uint64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import data_address, leading_zeros, prefetch_to_read, prefetch_to_write, record_at
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
    store_lanes,
    store_one,
    widened,
)
from rowhaul.store.records import mix

ONE_ACCESS = 1 << 12
MOST = 2**32 - 1  # counts stop here, at a million accesses
_ENTRIES_AHEAD = 16
_MOST, _ONE_ACCESS = uint64(MOST), uint64(ONE_ACCESS)


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
def count_absent(keys, entries, table_starts, seeds, bits, registers):
    """Count the keys that have no entry, and note their hashes in a counter of ``2**bits`` registers.

    A register keeps the longest run of zeros behind the first bits of a hash, and one.
    """
    count = 0
    for table in range(len(table_starts) - 1):
        for i in range(table_starts[table], table_starts[table + 1]):
            is_absent = int64(entries[i] < 0)
            hashed = mix(uint64(keys[i]) ^ seeds[table])
            register = int64(hashed >> uint64(64 - bits))
            rank = min(leading_zeros(hashed << uint64(bits)), 64 - bits) + 1
            registers[register] = max(registers[register], is_absent * rank)
            count += is_absent
    return count


@kernel
def read_slots(addresses, shift, width, entries, slots, held):
    """Copy the slots of entries, and count those that are not empty."""
    num_chunks, count, entry_bytes = slots.shape[1], len(entries), width * 4
    memory, target = data_address(addresses), data_address(slots)
    for i in range(count):
        prefetch_to_read(record_at(memory, shift, entry_bytes, entries[min(i + _ENTRIES_AHEAD, count - 1)]))
        source = record_at(memory, shift, entry_bytes, entries[i])
        copy_row(target + i * num_chunks * 4, source, num_chunks * 4)
        num_held = 0
        for k in range(num_chunks):
            num_held += load_one(source + 4 * k, int32(0)) >= 0
        held[i] = num_held


@kernel
def count_accesses(addresses, shift, width, entries, accesses, powers, now):
    """Decay the counts of entries up to step ``now`` and add accesses; ``powers`` are of `count_powers`."""
    count, entry_bytes = len(entries), width * 4
    memory, place = data_address(addresses), entry_bytes - 8
    for i in range(count):
        soon = record_at(memory, shift, entry_bytes, entries[min(i + _ENTRIES_AHEAD, count - 1)])
        prefetch_to_write(soon + place)
        address = record_at(memory, shift, entry_bytes, entries[i]) + place
        steps = now - load_one(address + 4, int32(0))
        before = uint64(uint32(load_one(address, int32(0))))
        if steps > 0:
            before = (before * powers[0, steps & 1023]) >> uint64(32)
            before = (before * powers[1, min(steps >> 10, 1023)]) >> uint64(32)
        total = min(before + uint64(accesses[i]) * _ONE_ACCESS, _MOST)
        store_one(address, int32(uint32(total)))
        store_one(address + 4, int32(now))


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
def add_norms(addresses, shift, width, entries, accesses, starts, gradients, powers, now):
    """``u <- decay**steps * u + accesses * norm`` of every chunk of entries, there or not.

    ``gradients`` are of stored values; ``powers`` are those of `decay_powers`. Squares are added up in double
    precision, in four running sums that are joined in a fixed order. Chunks are mostly small, so that most of
    the time goes into what comes after that: joining the sums, a root, the decay. If chunks are of one size,
    these are done for four at once; a lane is rounded as a single number would be.
    """
    num_chunks, count, entry_bytes = len(starts) - 1, len(entries), width * 4
    memory, zero = data_address(addresses), gradients.dtype.type(0)
    size = size_of(zero)
    chunk_values = starts[1] - starts[0]
    chunk_bytes, row_bytes = chunk_values * size, gradients.shape[1] * size
    in_fours = 0  # chunks done four at a time
    if chunk_values % 4 == 0 and starts[-1] == num_chunks * chunk_values:
        in_fours = num_chunks - num_chunks % 4
    for i in range(count):
        soon = record_at(memory, shift, entry_bytes, entries[min(i + _ENTRIES_AHEAD, count - 1)])
        prefetch_to_write(soon)
        prefetch_to_write(soon + entry_bytes - 1)
        address = record_at(memory, shift, entry_bytes, entries[i])
        gradient = data_address(gradients) + i * row_bytes
        steps = now - load_one(address + 8 * num_chunks, int32(0))
        kept = powers[0, steps & 1023] * powers[1, min(steps >> 10, 1023)]
        store_one(address + 8 * num_chunks, int32(now))
        times = float(accesses[i])
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
            store_lanes(place, narrowed(four_times(kept) * before + four_times(times) * norms))
        for k in range(in_fours, num_chunks):
            norm = _norm(gradient + starts[k] * size, starts[k + 1] - starts[k], size, zero)
            place = address + 4 * (num_chunks + k)
            store_one(place, float32(kept * float(load_one(place, float32(0))) + times * norm))


@kernel
def chunk_norms(gradients, starts):
    """Return the norm of every chunk of some gradients of stored values, to the same bits as `add_norms`."""
    num_chunks, zero = len(starts) - 1, gradients.dtype.type(0)
    size = size_of(zero)
    norms = np.empty((len(gradients), num_chunks), np.float64)
    for i in range(len(gradients)):
        gradient = data_address(gradients) + i * gradients.shape[1] * size
        for k in range(num_chunks):
            norms[i, k] = _norm(gradient + starts[k] * size, starts[k + 1] - starts[k], size, zero)
    return norms
