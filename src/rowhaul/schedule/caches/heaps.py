"""Smallest priority first: one heap of copies per worker, for every policy that sorts by keys.

Keys are packed into two integers by weights that follow from the policy, so that one compiled heap
serves all of them. Of rows of unequal size, when room is counted in bytes, the frequency counts per
byte; the other keys are what they are.
"""

from __future__ import annotations

import numpy as np

from rowhaul.schedule.arrays import Arrays, Saved, extended
from rowhaul.schedule.caches.copies import CopyPool
from rowhaul.schedule.caches.heap_kernels import (
    SCALE_BITS,
    append,
    begin_ages,
    demote,
    evict_smallest,
    keep_valid,
    queue,
    touch,
)
from rowhaul.schedule.caches.order import Int32s, Int64s, Segments, Step, with_room
from rowhaul.schedule.caches.policies import Policy

# What a heap knows of each copy.
NOTE = np.dtype(
    [
        ("rank", np.int32),  # its row's place among the rows of the batch that used it last
        ("frequency", np.int32),  # 0 while the copy is free
        ("mark", np.int32),
        ("ticket", np.int32),  # of the entry that counts
        ("outdated", np.uint8),
        ("queued", np.uint8),  # whether there is such an entry
    ]
)

ENTRY = np.dtype(
    [
        ("major", np.int64),
        ("minor", np.int64),
        ("stamp", np.int64),  # last use and rank
        ("copy", np.int32),
        ("ticket", np.int32),
    ]
)

# Bits that a key's values can take; frequency counts in 1 / 2**SCALE_BITS.
_KEY_BITS = {"latest": 1, "mark": 31, "frequency": 31 + SCALE_BITS}
_WORD_BITS = 61


def _weights(keys: tuple[str, ...]) -> Int64s:
    """Factors of (latest, mark, frequency) in the two words of a priority, the first key the highest."""
    weights = np.zeros((2, len(_KEY_BITS)), np.int64)
    word, shift = 1, 0
    for key in reversed(keys):
        if shift + _KEY_BITS[key] > _WORD_BITS:
            word, shift = 0, 0
        weights[word, list(_KEY_BITS).index(key)] = 1 << shift
        shift += _KEY_BITS[key]
    return weights


class PriorityHeaps:
    """An `Order`: sorts copies by the keys of a policy."""

    def __init__(self, num_workers: int, in_bytes: bool, policy: Policy) -> None:
        self._in_bytes = in_bytes
        self._by_next_use = "next_use" in policy.keys
        self._sees_others = self._by_next_use or "latest" in policy.keys
        self._weights = _weights(tuple(key for key in policy.keys if key != "next_use"))
        self._notes = np.zeros(0, NOTE)
        self._num_entries = np.zeros(num_workers, np.int64)
        self._heaps = Segments(ENTRY, self._num_entries)
        # Workers: the mark that used rows get, how many copies have it, and how many copies there are.
        self._target = np.ones(num_workers, np.int32)
        self._num_marked = np.zeros(num_workers, np.int64)
        self._num_copies = np.zeros(num_workers, np.int64)

    def reserve(self, step: Step, pool: CopyPool) -> None:
        """See `Order`."""
        if len(self._notes) < len(pool):
            self._notes = extended(self._notes, len(pool))
        num_rows = len(step.slots)  # a worker has at most one copy of a row, which is pushed at most once
        self._heaps = with_room(self._heaps, lambda: self._num_entries + num_rows, self._compact)

    def evict(self, step: Step, pool: CopyPool, used: Int64s, capacities: Int64s) -> int:
        """See `Order`."""
        heaps = self._heaps
        begin_ages(step.demand, used, capacities, self._target, self._num_marked, self._num_copies)
        touch(
            step.iteration, step.slots, step.current, step.pair_rows, step.pair_workers, step.pair_copies,
            step.size, self._in_bytes, self._weights, self._by_next_use, self._target, self._num_marked,
            pool.copies, self._notes,
        )  # fmt: skip
        if self._sees_others:
            demote(
                step.slots, step.trainers, step.current, step.size, self._in_bytes, step.next_use,
                self._weights, self._by_next_use, pool.head, pool.copies, self._notes,
                heaps.entries, heaps.start, self._num_entries,
            )  # fmt: skip
        num_victims: int = evict_smallest(
            step.iteration, step.size, self._in_bytes, step.next_use, self._weights, self._by_next_use,
            step.demand, used, capacities, self._target, self._num_marked, self._num_copies,
            pool.copies, self._notes, heaps.entries, heaps.start, self._num_entries, pool.free, pool.num_free,
        )  # fmt: skip
        return num_victims

    def append(self, step: Step, pool: CopyPool) -> None:
        """See `Order`."""
        heaps = self._heaps
        append(
            step.slots, step.current, step.pair_rows, step.pair_workers, step.pair_copies,
            step.size, self._in_bytes, step.next_use, self._weights, self._by_next_use,
            self._target, self._num_marked, self._num_copies,
            pool.copies, self._notes, heaps.entries, heaps.start, self._num_entries,
        )  # fmt: skip

    def forget(self, copies: Int32s, pool: CopyPool) -> None:
        """See `Order`: entries that carry an older ticket do not count."""
        notes, workers = self._notes, pool.copies["worker"][copies]
        marked = workers[notes["mark"][copies] == self._target[workers]]
        self._num_copies -= np.bincount(workers, minlength=len(self._target))
        self._num_marked -= np.bincount(marked, minlength=len(self._target))
        notes["ticket"][copies] += 1
        notes["frequency"][copies] = 0
        notes["queued"][copies] = 0

    def export(self, copies: Int32s) -> Arrays:
        """See `Order`; heaps follow from what is known of the copies, ranks from the order of their rows."""
        known = {name: self._notes[name][copies] for name in ("frequency", "mark", "outdated")}
        return {**known, "target": self._target.copy()}

    def restore(self, saved: Saved, copies: Int32s, rows: Int32s, room: Int64s, pool: CopyPool) -> None:
        """See `Order`."""
        self._notes = extended(self._notes, len(pool))
        self._notes["rank"][copies] = rows
        for name, dtype in (("frequency", np.int32), ("mark", np.int32), ("outdated", np.uint8)):
            self._notes[name][copies] = saved.array(name, dtype, len(copies))
        self._target = saved.array("target", np.int32, len(self._target))
        workers = pool.copies["worker"][copies]
        marked = self._notes["mark"][copies] == self._target[workers]
        self._num_marked = np.bincount(workers[marked], minlength=len(self._target))
        self._num_copies = np.bincount(workers, minlength=len(self._target))
        self._heaps = Segments(ENTRY, self._num_copies)
        queue(
            copies, room, self._weights, pool.copies, self._notes,
            self._heaps.entries, self._heaps.start, self._num_entries,
        )  # fmt: skip

    @property
    def allocated_bytes(self) -> int:
        """See `Order`."""
        return self._notes.nbytes + self._heaps.entries.nbytes

    def _compact(self, worker: int, target: Segments) -> None:
        heaps = self._heaps
        self._num_entries[worker] = keep_valid(
            self._notes, heaps.entries, heaps.start[worker], self._num_entries[worker],
            target.entries, target.start[worker],
        )  # fmt: skip
