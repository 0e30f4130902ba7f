"""Compiled loops over logs of use: ring buffers of (copy, iteration), oldest first."""

from __future__ import annotations

from numba import int64

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_read

_AHEAD = 16  # how many entries ahead of their use copies are asked for


@kernel
def first_unknown(slots, size, known):
    """The first size of a row that is not among the ``known``, or 0."""
    kind = 0
    for slot in slots:
        if kind == len(known) or size[slot] != known[kind]:
            kind = 0
            while kind < len(known) and size[slot] != known[kind]:
                kind += 1
            if kind == len(known):
                return size[slot]
    return 0


@kernel
def evict_oldest(
    iteration, pair_copies, demand, used, capacities, sizes,
    entries, start, capacity, first, last, copies, free, num_free,
):  # fmt: skip
    """Touch the batch's copies and choose victims until its missing rows fit; returns their number.

    An entry of a log counts only while its copy was not used again.
    """
    for copy in pair_copies:
        if copy >= 0:
            copies[copy].last_use = iteration
    copies_at = int64(copies.ctypes.data)
    num_workers = len(used)
    num_victims = 0
    for worker in range(num_workers):
        while used[worker] + demand[worker].missing_room > capacities[worker]:
            victim, victim_log, victim_use, largest = -1, -1, -1, -1
            for kind in range(len(sizes)):
                log = kind * num_workers + worker
                mask = capacity[log] - 1
                while first[log] < last[log]:
                    ahead = entries[start[log] + ((first[log] + _AHEAD) & mask)].copy
                    prefetch_to_read(copies_at + ahead * copies.itemsize)
                    entry = entries[start[log] + (first[log] & mask)]
                    if copies[entry.copy].last_use == entry.last_use:
                        claim = (iteration - entry.last_use) * sizes[kind]
                        if claim > largest or (claim == largest and entry.last_use < victim_use):
                            victim, victim_log, victim_use, largest = entry.copy, log, entry.last_use, claim
                        break
                    first[log] += 1
            first[victim_log] += 1
            used[worker] -= sizes[victim_log // num_workers]
            free[num_free + num_victims] = victim
            num_victims += 1
    return num_victims


@kernel
def append(
    iteration, slots, pair_rows, pair_workers, pair_copies, size, sizes, num_workers,
    entries, start, capacity, last,
):  # fmt: skip
    """Note the use of all rows of a batch."""
    kind = 0
    for pair in range(len(pair_rows)):
        if len(sizes) > 1:
            wanted = size[slots[pair_rows[pair]]]
            if sizes[kind] != wanted:
                kind = 0
                while sizes[kind] != wanted:
                    kind += 1
        log = kind * num_workers + pair_workers[pair]
        entry = entries[start[log] + (last[log] & (capacity[log] - 1))]
        entry.copy = pair_copies[pair]
        entry.last_use = iteration
        last[log] += 1


@kernel
def keep_valid(
    first, last, source, source_start, source_capacity, target, target_start, target_capacity, copies
):
    """Copy the entries of a log that still count to the same place or another; returns the new end."""
    end = first
    for i in range(first, last):
        entry = source[source_start + (i & (source_capacity - 1))]
        target[target_start + (end & (target_capacity - 1))] = entry
        end += copies[entry.copy].last_use == entry.last_use
    return end
