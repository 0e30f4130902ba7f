"""Least recently used first: logs of use, from whose old end victims are taken.

A use is appended to its worker's log and nothing else is touched; an entry whose copy was used again
later is skipped when it comes to the front. Rows arrive in (table, key) order, so entries of one
iteration already lie in the order in which ties are broken.

Of rows of unequal size the one with the largest age times bytes goes first: the least recency per byte.
That product changes from iteration to iteration, but not the order within one size; so there is a log
for every size, and only their fronts are compared.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import int64

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_read
from rowhaul.schedule.arrays import Arrays, Saved
from rowhaul.schedule.caches.copies import CopyPool
from rowhaul.schedule.caches.order import Int32s, Int64s, Segments, Step, with_room
from rowhaul.schedule.threads import Threads, take

_AHEAD = 16  # entries between asking for a copy and using it
ENTRY = np.dtype([("copy", np.int32), ("last_use", np.int32)])


class RecencyLogs:
    """An `Order`: one log for each worker and size of rows."""

    def __init__(self, num_workers: int, in_bytes: bool, threads: Threads) -> None:
        self._threads = threads
        self._num_workers = num_workers
        self._in_bytes = in_bytes
        # The log of worker w and the k-th size is number k * workers + w. Its entries first .. last are in
        # use; the counters only grow and wrap around its capacity.
        self._sizes = np.array([] if in_bytes else [1], np.int64)
        self._first = np.zeros(num_workers * len(self._sizes), np.int64)
        self._last = self._first.copy()
        self._logs = Segments(ENTRY, self._first)

    def reserve(self, step: Step, pool: CopyPool) -> None:
        """See `Order`."""
        if self._in_bytes:
            self._know_sizes(step, pool)

        def num_needed() -> Int64s:
            in_use = (self._last - self._first).reshape(-1, self._num_workers)
            needed: Int64s = (in_use + step.demand["num_rows"]).ravel()
            return needed

        self._logs = with_room(self._logs, num_needed, partial(self._compact, pool))

    def evict(self, step: Step, pool: CopyPool, used: Int64s, capacities: Int64s) -> int:
        """See `Order`."""
        logs, num_workers = self._logs, self._num_workers
        excess = np.maximum(used + step.demand["missing_room"] - capacities, 0)
        most = -(-excess // (self._sizes.min() if len(self._sizes) else 1))  # victims: every one leaves room
        starts, counts = np.append(0, np.cumsum(most)), np.zeros(num_workers, np.int64)
        victims = np.empty(starts[-1], np.int32)
        if len(victims):
            self._threads.share(
                lambda counter: evict_oldest(
                    step.iteration, step.demand, used, capacities, self._sizes,
                    logs.entries, logs.start, logs.capacity, self._first, self._last,
                    pool.copies, starts, counter, victims, counts,
                ),
                num_workers,
            )  # fmt: skip
        num_victims: int = put_together(victims, starts, counts, pool.free, pool.num_free)
        return num_victims

    def append(self, step: Step, pool: CopyPool) -> None:
        """See `Order`."""
        logs = self._logs
        if len(self._sizes) != 1:
            append(
                step.iteration, step.slots, step.pair_rows, step.pair_workers, step.pair_copies, step.size,
                self._sizes, self._num_workers, logs.entries, logs.start, logs.capacity, self._last,
            )  # fmt: skip
            return
        self._threads.share(
            lambda counter: append_chunks(
                step.iteration, step.pair_workers, step.pair_copies, step.pair_edges, step.rows_before,
                counter, logs.entries, logs.start, logs.capacity, self._last,
            ),
            len(step.pair_edges) - 1,
        )  # fmt: skip
        self._last += step.demand["num_rows"]

    def forget(self, copies: Int32s, pool: CopyPool) -> None:
        """See `Order`: entries only count while they have their copy's last use."""
        pool.copies["last_use"][copies] = -1

    def export(self, copies: Int32s) -> Arrays:
        """See `Order`: the last uses, which the pool knows, are everything."""
        return {}

    def restore(self, saved: Saved, copies: Int32s, rows: Int32s, room: Int64s, pool: CopyPool) -> None:
        """See `Order`."""
        if self._in_bytes:
            self._sizes = np.unique(room)
        last_use = pool.copies["last_use"][copies]
        log = np.searchsorted(self._sizes, room) * self._num_workers + pool.copies["worker"][copies]
        self._first = np.zeros(self._num_workers * len(self._sizes), np.int64)
        self._last = np.bincount(log, minlength=len(self._first))
        self._logs = Segments(ENTRY, self._last)
        order = np.lexsort((rows, last_use, log))
        before = np.cumsum(self._last) - self._last
        place = self._logs.start[log[order]] + np.arange(len(order)) - before[log[order]]
        self._logs.entries["copy"][place] = copies[order]
        self._logs.entries["last_use"][place] = last_use[order]

    @property
    def allocated_bytes(self) -> int:
        """See `Order`."""
        return self._logs.entries.nbytes

    def _know_sizes(self, step: Step, pool: CopyPool) -> None:
        while size := first_unknown(step.slots, step.size, self._sizes):
            none = np.zeros(self._num_workers, np.int64)
            more = Segments(ENTRY, np.append(self._logs.capacity, none))
            for log in range(len(self._first)):
                self._compact(pool, log, more)
            self._logs = more
            self._sizes = np.append(self._sizes, size)
            self._first, self._last = np.append(self._first, none), np.append(self._last, none)

    def _compact(self, pool: CopyPool, log: int, target: Segments) -> None:
        source = self._logs
        self._last[log] = keep_valid(
            self._first[log], self._last[log], source.entries, source.start[log], source.capacity[log],
            target.entries, target.start[log], target.capacity[log], pool.copies,
        )  # fmt: skip


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
    iteration, demand, used, capacities, sizes, entries, start, capacity, first, last,
    copies, starts, counter, victims, counts,
):  # fmt: skip
    """Choose victims until the missing rows of a batch fit, worker by worker; also counts them.

    Those of worker w are written from starts[w] on. An entry of a log counts only while its copy was not used
    again.
    """
    copies_at = int64(copies.ctypes.data)
    num_workers = len(used)
    worker = take(counter)
    while worker < num_workers:
        num_victims = 0
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
            victims[starts[worker] + num_victims] = victim
            num_victims += 1
        counts[worker] = num_victims
        worker = take(counter)


@kernel
def put_together(parts, starts, counts, stack, top):
    """Put the first ``counts`` of each part on a stack; returns how many they are."""
    count = 0
    for part in range(len(counts)):
        for i in range(starts[part], starts[part] + counts[part]):
            stack[top + count] = parts[i]
            count += 1
    return count


@kernel
def append_chunks(
    iteration, pair_workers, pair_copies, pair_edges, rows_before, counter, entries, start, capacity, last
):
    """Note the use of all rows of a batch, in chunks, where there is one size; ``last`` stays as it is."""
    place = np.empty(len(last), np.int64)
    chunk = take(counter)
    while chunk < len(pair_edges) - 1:
        for worker in range(len(last)):
            place[worker] = last[worker] + rows_before[chunk, worker]
        for pair in range(pair_edges[chunk], pair_edges[chunk + 1]):
            worker = pair_workers[pair]
            entry = entries[start[worker] + (place[worker] & (capacity[worker] - 1))]
            entry.copy = pair_copies[pair]
            entry.last_use = iteration
            place[worker] += 1
        chunk = take(counter)


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
    copies_at = int64(copies.ctypes.data)
    end = first
    for i in range(first, last):
        ahead = source[source_start + ((i + _AHEAD) & (source_capacity - 1))].copy
        prefetch_to_read(copies_at + ahead * copies.itemsize)
        entry = source[source_start + (i & (source_capacity - 1))]
        target[target_start + (end & (target_capacity - 1))] = entry
        end += copies[entry.copy].last_use == entry.last_use
    return end
