"""Compiled loops of the distributed database: divide rows by rank, and sum gradients."""

from __future__ import annotations

from numba import uint64

from rowhaul._kernels import kernel
from rowhaul._memory import memory_at, prefetch_to_read
from rowhaul.store.records import mix

_VECTORS_AHEAD = 8


@kernel
def find_owners(keys, num_ranks, owners):
    """Low bits of a hash of each key, modulo the number of ranks.

    A second hash, since the index of a rank takes shards and slots from the first one: keys that agree in its
    low bits would share few slots.
    """
    for i in range(len(keys)):
        hashed = mix(mix(keys[i]) ^ uint64(0x9E3779B97F4A7C15))
        owners[i] = (hashed & uint64(0xFFFFFFFF)) % uint64(num_ranks)


@kernel
def sort_by_rank(ranks, starts, counts, bounds, order, places):
    """Sort rows, given table by table, by rank; within a rank they keep their order.

    Fills ``counts`` (ranks x tables, zeros before), ``bounds`` of each rank's rows, ``order`` (the row at
    each place) and ``places`` (the place of each row).
    """
    for table in range(len(starts) - 1):
        for row in range(starts[table], starts[table + 1]):
            counts[ranks[row], table] += 1
    bounds[0] = 0
    for rank in range(len(bounds) - 1):
        bounds[rank + 1] = bounds[rank] + counts[rank].sum()
    free = bounds.copy()
    for row in range(len(ranks)):
        place = free[ranks[row]]
        free[ranks[row]] = place + 1
        order[place] = row
        places[row] = place


@kernel
def count_bags(inverse, offsets, firsts, ranks, num_entries, num_bags):
    """Count by rank and table the entries of its rows in bags, and the bags that contain any."""
    last_bag = num_bags[:, 0].copy()
    last_bag[:] = -1
    for table in range(len(firsts) - 1):
        for bag in range(firsts[table], firsts[table + 1]):
            for i in range(offsets[bag], offsets[bag + 1]):
                rank = ranks[inverse[i]]
                num_entries[rank, table] += 1
                if last_bag[rank] != bag:
                    last_bag[rank] = bag
                    num_bags[rank, table] += 1


@kernel
def gather_bags(
    inverse, offsets, firsts, starts, ranks, is_summed, places, vector_ends, entry_ends, entries, lengths,
    vectors, new_inverse, new_offsets, current,
):  # fmt: skip
    """Describe what each rank sends, as bags of the rows it is asked for, and the vectors made of that.

    A rank first sends single rows, as bags of one, then sums. ``vector_ends`` and ``entry_ends`` are where
    each rank's begin; ``current`` (2 x ranks, -1) is scratch: the bag being summed, and its vector. Returns
    the new number of entries of the vectors.
    """
    for table in range(len(starts) - 1):
        for row in range(starts[table], starts[table + 1]):
            rank = ranks[row]
            if not is_summed[rank, table]:
                vectors[row] = vector_ends[rank]
                lengths[vector_ends[rank]] = 1
                vector_ends[rank] += 1
                entries[entry_ends[rank]] = places[row]
                entry_ends[rank] += 1
    count = 0
    for table in range(len(firsts) - 1):
        for bag in range(firsts[table], firsts[table + 1]):
            new_offsets[bag] = count
            for i in range(offsets[bag], offsets[bag + 1]):
                row = inverse[i]
                rank = ranks[row]
                if not is_summed[rank, table]:
                    new_inverse[count] = vectors[row]
                    count += 1
                    continue
                if current[0, rank] != bag:
                    current[0, rank] = bag
                    current[1, rank] = vector_ends[rank]
                    vector_ends[rank] += 1
                    lengths[current[1, rank]] = 0
                    new_inverse[count] = current[1, rank]
                    count += 1
                lengths[current[1, rank]] += 1
                entries[entry_ends[rank]] = places[row]
                entry_ends[rank] += 1
    new_offsets[-1] = count
    return count


@kernel
def add_gradients(inverse, offsets, gradients_address, vector_bytes, sums):
    """Add the gradient of every vector to the rows of ``sums`` that it is made of, in order.

    Gradients are ``vector_bytes`` apart: they may be columns of a wider array.
    """
    dim = sums.shape[1]
    for vector in range(len(offsets) - 1):
        address = gradients_address + vector * vector_bytes
        prefetch_to_read(address + _VECTORS_AHEAD * vector_bytes)
        gradient = memory_at(address, dim, sums.dtype)
        for i in range(offsets[vector], offsets[vector + 1]):
            row = inverse[i]
            for k in range(dim):
                sums[row, k] += gradient[k]
