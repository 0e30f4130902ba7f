"""Smallest priority first: one heap of copies per worker, for every policy that sorts by keys.

Keys are packed into two integers by weights that follow from the policy, so that one compiled heap serves all
of them. Of rows of unequal size, when room is counted in bytes, the frequency counts per byte; the other keys
are what they are.

An entry remembers the priority that its copy had when it was pushed. A copy whose priority rises keeps its
entry, which is corrected when it comes to the top; one whose priority falls gets another entry. Entries carry
a ticket, and only the one with the copy's latest ticket counts.
"""

from __future__ import annotations

import numpy as np
from numba import int64
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul.schedule.arrays import Arrays, Saved, extended
from rowhaul.schedule.caches.copies import CopyPool
from rowhaul.schedule.caches.order import Int32s, Int64s, Segments, Step, with_room
from rowhaul.schedule.heap import heapify, pop, sift_down, sift_up
from rowhaul.schedule.masks import bit

SCALE_BITS = 24  # of a frequency per byte behind the point: rows of one size, up to 16 MiB, keep their order
_USED_AGAIN = 1 << 62  # above the priorities of all rows that the window shows no use of

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
        ("item", np.int32),  # the copy
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

    def __init__(self, num_workers: int, in_bytes: bool, keys: tuple[str, ...]) -> None:
        self._in_bytes = in_bytes
        self._by_next_use = "next_use" in keys
        self._sees_others = self._by_next_use or "latest" in keys
        self._weights = _weights(tuple(key for key in keys if key != "next_use"))
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


@register_jitable
def _priority(note, room, next_use, weights, by_next_use):
    """What a copy is sorted by before its last use: two numbers, of which the first decides."""
    if by_next_use and next_use > 0:
        return int64(_USED_AGAIN) - int64(next_use), int64(0)
    latest = int64(1) - int64(note.outdated)
    mark = int64(note.mark)
    frequency = int64(note.frequency) << int64(SCALE_BITS)
    if room > 1:
        frequency //= room
    return (
        weights[0, 0] * latest + weights[0, 1] * mark + weights[0, 2] * frequency,
        weights[1, 0] * latest + weights[1, 1] * mark + weights[1, 2] * frequency,
    )


@register_jitable
def _stamp(record, note):
    """The place in time and, within an iteration, in (table, key) order of a copy's last use."""
    return (int64(record.last_use) << int64(32)) | int64(note.rank)


@register_jitable
def _push(entries, start, num_entries, worker, note, major, minor, stamp, copy):
    """Queue a copy in its worker's heap; an entry it had there before no longer counts."""
    note.ticket += 1
    note.queued = 1
    at = num_entries[worker]
    num_entries[worker] += 1
    sift_up(entries, start[worker], at, major, minor, stamp, copy, note.ticket)


@kernel
def begin_ages(demand, used, capacities, target, num_marked, num_copies):
    """Raise the mark of used rows on workers that are full of copies which all have it."""
    for worker in range(len(used)):
        needs = demand[worker]
        full = needs.num_rows > 0 and used[worker] + needs.smallest > capacities[worker]
        if full and num_marked[worker] == num_copies[worker]:
            target[worker] += 1
            num_marked[worker] = 0


@kernel
def touch(
    iteration, slots, current, pair_rows, pair_workers, pair_copies, size, in_bytes, weights, by_next_use,
    target, num_marked, copies, notes,
):  # fmt: skip
    """Note the use of the copies that the batch's trainers have."""
    for pair in range(len(pair_rows)):
        row, worker, copy = pair_rows[pair], pair_workers[pair], pair_copies[pair]
        if copy < 0:
            continue
        note = notes[copy]
        room = size[slots[row]] if in_bytes else 1
        old_major, old_minor = _priority(note, room, 0, weights, False)
        copies[copy].last_use = iteration
        note.rank = row
        note.frequency += 1
        note.outdated = 0 if current[row] & bit(worker) else 1
        if note.mark != target[worker]:
            note.mark = target[worker]
            num_marked[worker] += 1
        major, minor = _priority(note, room, 0, weights, False)
        if by_next_use or major < old_major or (major == old_major and minor < old_minor):
            note.ticket += 1  # its entry no longer counts; `append` makes another
            note.queued = 0


@kernel
def demote(
    slots, trainers, current, size, in_bytes, next_use, weights, by_next_use,
    head, copies, notes, entries, start, num_entries,
):  # fmt: skip
    """Note what a batch means for the copies of its rows on workers that do not train them."""
    for row in range(len(slots)):
        slot = slots[row]
        copy = head[slot]
        while copy >= 0:
            record = copies[copy]
            mine = bit(record.worker)
            if not trainers[row] & mine:
                note = notes[copy]
                outdated = 0 if current[row] & mine else 1
                lower = outdated > note.outdated
                note.outdated = outdated
                if by_next_use or lower:
                    room = size[slot] if in_bytes else 1
                    major, minor = _priority(note, room, next_use[slot], weights, by_next_use)
                    stamp = _stamp(record, note)
                    _push(entries, start, num_entries, record.worker, note, major, minor, stamp, copy)
            copy = record.next


@kernel
def evict_smallest(
    iteration, size, in_bytes, next_use, weights, by_next_use, demand, used, capacities, target, num_marked,
    num_copies, copies, notes, entries, start, num_entries, free, num_free,
):  # fmt: skip
    """Choose victims until the batch's missing rows fit; returns their number."""
    num_victims = 0
    for worker in range(len(used)):
        root = start[worker]
        while used[worker] + demand[worker].missing_room > capacities[worker]:
            top = entries[root]
            copy = top.item
            record, note = copies[copy], notes[copy]
            if note.ticket == top.ticket:
                if record.last_use == iteration:  # of the running batch: `append` makes another entry
                    note.queued = 0
                else:
                    slot = record.slot
                    room = size[slot] if in_bytes else 1
                    major, minor = _priority(note, room, next_use[slot], weights, by_next_use)
                    stamp = _stamp(record, note)
                    if major != top.major or minor != top.minor or stamp != top.stamp:
                        sift_down(
                            entries, root, num_entries[worker], 0, major, minor, stamp, copy, note.ticket
                        )
                        continue
                    free[num_free + num_victims] = copy
                    num_victims += 1
                    used[worker] -= room
                    num_copies[worker] -= 1
                    num_marked[worker] -= note.mark == target[worker]
                    note.frequency = 0
            pop(entries, root, num_entries[worker])
            num_entries[worker] -= 1
    return num_victims


@kernel
def append(
    slots, current, pair_rows, pair_workers, pair_copies, size, in_bytes, next_use, weights, by_next_use,
    target, num_marked, num_copies, copies, notes, entries, start, num_entries,
):  # fmt: skip
    """Queue those copies of a batch that are new or have no entry that counts."""
    for pair in range(len(pair_rows)):
        row, worker, copy = pair_rows[pair], pair_workers[pair], pair_copies[pair]
        note = notes[copy]
        if note.frequency == 0:
            note.rank = row
            note.frequency = 1
            note.mark = target[worker]
            note.outdated = 0 if current[row] & bit(worker) else 1
            note.queued = 0
            num_marked[worker] += 1
            num_copies[worker] += 1
        if not note.queued:
            slot = slots[row]
            room = size[slot] if in_bytes else 1
            major, minor = _priority(note, room, next_use[slot], weights, by_next_use)
            stamp = _stamp(copies[copy], note)
            _push(entries, start, num_entries, worker, note, major, minor, stamp, copy)


@kernel
def queue(queued, rooms, weights, copies, notes, entries, start, num_entries):
    """Queue copies that have no entry, as if no window showed a use of them: from there they only rise."""
    for i in range(len(queued)):
        copy = queued[i]
        record, note = copies[copy], notes[copy]
        major, minor = _priority(note, rooms[i], 0, weights, False)
        _push(entries, start, num_entries, record.worker, note, major, minor, _stamp(record, note), copy)


@kernel
def keep_valid(notes, source, source_start, length, target, target_start):
    """Copy the entries of a heap that still count to the same place or another; returns their number."""
    num_kept = 0
    for i in range(length):
        entry = source[source_start + i]
        target[target_start + num_kept] = entry
        num_kept += notes[entry.item].ticket == entry.ticket
    heapify(target, target_start, num_kept)
    return num_kept
