"""The rows of a table group as they were at one moment, read by one thread while others train.

Taking a snapshot copies nothing. While it is open, a record is copied before training changes it, or when its
key is removed, unless it was read before; records allocated later are not in it. See `snapshot_kernels`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.errors import RowhaulError
from rowhaul.optim import SGD
from rowhaul.store.arena import RecordArena
from rowhaul.store.index import Int64s
from rowhaul.store.keyed import remove
from rowhaul.store.snapshot_kernels import (
    GONE,
    PENDING,
    count_pending,
    keep_changing,
    keep_removed,
    take_records,
)
from rowhaul.store.tables import TableGroup, TableSpec

Rows = tuple[Int64s, npt.NDArray[Any]]

KEPT_SHARE = 1 / 16  # of its records, copied before they changed; more, and the snapshot is crowded
LEAST_KEPT_BYTES = 16 << 20  # that do not matter
STATE_BYTES, MARK_BYTES = 4, 1  # of a snapshot, for each record
_SLICE_ROWS = 1 << 13  # copied at a time
_REMOVAL_SECONDS = 60.0  # that a thread may take from removing a key to keeping its record


class _Removed(NamedTuple):
    """Rows that were removed since, and the slots of their records."""

    keys: Int64s
    slots: Int64s


class GroupSnapshot:
    """A snapshot of a group; taken while nothing changes it, read once, closed in any thread.

    Rows can be marked before training goes on, to read those with and those without a mark separately.
    """

    def __init__(self, group: TableGroup) -> None:
        self._index, self._arena = group.index, group.arena
        if self._arena.keeper is not None:
            raise RowhaulError("there is a snapshot of these rows already; close it first")
        num_numbers, free = self._arena.used()
        self._states = np.full(num_numbers, PENDING, np.int32)
        self._states[free] = GONE
        self._marks = np.zeros(0, np.uint8)
        self._num_left = np.stack([self._index.num_keys, np.zeros_like(self._index.num_keys)])
        self._kept = RecordArena(self._arena.width, self._arena.dtype)
        self._keeping = threading.Lock()  # between the threads that train
        self._removals: queue.SimpleQueue[tuple[Int64s, Int64s, Int64s, Int64s]] = queue.SimpleQueue()
        self._removed: defaultdict[tuple[int, int], list[_Removed]] = defaultdict(list)
        self._is_open = True
        self._arena.keeper = self

    def mark(self, tables: Int64s, records: Int64s) -> None:
        """Mark records, which differ and have no mark, of the tables given with them."""
        if not len(self._marks):
            self._marks = np.zeros(len(self._states), np.uint8)
        self._marks[records] = 1
        counts = np.bincount(tables, minlength=self._index.num_tables)
        self._num_left += np.stack([-counts, counts])

    def num_rows(self, table: int, *, marked: bool = False) -> int:
        """Count the rows of a table that are still to be read."""
        return int(self._num_left[int(marked), table])

    @property
    def is_crowded(self) -> bool:
        """Whether so many records had to be copied that the snapshot should be read faster."""
        return self._kept.num_records * self._arena.record_bytes > max(
            LEAST_KEPT_BYTES, KEPT_SHARE * self._arena.record_bytes * len(self._states)
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the snapshot takes by now."""
        return self._states.nbytes + self._marks.nbytes + self._kept.allocated_bytes

    def blocks(self, table: int, *, marked: bool = False) -> Iterator[Rows]:
        """Yield the rows of a table, with a mark or without, as blocks of (keys, records), and drop them."""
        left = self._num_left[int(marked)]
        for keys, records in self._index.blocks(table):
            for first in range(0, len(keys), _SLICE_ROWS):
                some = slice(first, first + _SLICE_ROWS)
                rows = self._take(keys[some], records[some], int(marked))
                if len(rows[0]):
                    left[table] -= len(rows[0])
                    yield rows
        deadline = time.monotonic() + _REMOVAL_SECONDS
        while left[table] > 0:
            self._sort_removals()
            for keys, slots in self._removed.pop((table, int(marked)), ()):
                left[table] -= len(keys)
                yield keys, self._kept.read(slots)
                self._kept.release(slots)
            if left[table] > 0:
                if time.monotonic() > deadline:
                    raise RowhaulError(f"{left[table]:,} rows of a snapshot are lost; please report this")
                time.sleep(0.001)  # a thread has removed keys, and is about to keep their records

    def keep(self, records: Int64s) -> None:
        """Copy records that are about to change."""
        arena, kept = self._arena, self._kept
        with self._keeping:
            if self._is_open and (most := count_pending(self._states, records)):
                slots = kept.allocate(most)
                used = keep_changing(
                    self._states, arena.addresses, arena.shift, arena.record_bytes, records, slots,
                    kept.addresses, kept.shift,
                )  # fmt: skip
                kept.release(slots[used:])

    def keep_removed(self, tables: Int64s, keys: Int64s, records: Int64s) -> None:
        """Copy records whose keys were removed, before their numbers are used again."""
        arena, kept = self._arena, self._kept
        with self._keeping:
            if not self._is_open:
                return
            slots = kept.allocate(count_pending(self._states, records))
            slot_of = np.empty(len(records), np.int64)
            used = keep_removed(
                self._states, arena.addresses, arena.shift, arena.record_bytes, records, slots,
                kept.addresses, kept.shift, slot_of,
            )  # fmt: skip
            kept.release(slots[used:])
        some = np.flatnonzero(slot_of >= 0)
        if len(some):
            marks = self._marks[records[some]] if len(self._marks) else np.zeros(len(some), np.uint8)
            self._removals.put((tables[some], marks.astype(np.int64), keys[some], slot_of[some]))

    def close(self) -> None:
        """Stop copying, and free the copies."""
        self._arena.keeper = None
        with self._keeping:  # a thread may still be copying
            self._is_open = False
            self._kept = RecordArena(self._arena.width, self._arena.dtype)

    def _take(self, keys: Int64s, records: Int64s, mark: int) -> Rows:
        arena, count = self._arena, len(records)
        out = np.empty((count, arena.width), arena.dtype)
        taken, kept, slots = (np.empty(count, np.int64) for _ in range(3))
        num_taken, num_kept = take_records(
            self._states, self._marks, mark, arena.addresses, arena.shift, arena.record_bytes, records,
            out.ctypes.data, taken, kept, slots,
        )  # fmt: skip
        if not num_kept:
            return (keys, out) if num_taken == count else (keys[taken[:num_taken]], out[:num_taken])
        places, slots = np.concatenate([taken[:num_taken], kept[:num_kept]]), slots[:num_kept]
        contents = np.concatenate([out[:num_taken], self._kept.read(slots)])
        self._kept.release(slots)
        order = np.argsort(places)
        return keys[places[order]], contents[order]

    def _sort_removals(self) -> None:
        """Divide what was removed by table and mark."""
        while not self._removals.empty():
            tables, marks, keys, slots = self._removals.get()
            for table, mark in np.unique(np.stack([tables, marks]), axis=1).T.tolist():
                some = (tables == table) & (marks == mark)
                self._removed[table, mark].append(_Removed(keys[some], slots[some]))


def compile_kernels() -> None:
    """Compile the kernels of snapshots, which training would otherwise do while the first one is open."""
    group, keys = TableGroup([TableSpec("any", 1, 0.0, 1.0)], SGD(lr=0.0), np.float32, 0), np.arange(3)
    records, table = group.make_fresh(np.zeros(3, np.int64), keys), np.zeros(1, np.int64)
    snapshot = GroupSnapshot(group)
    group.update(records[:1], np.zeros((1, 1), np.float32), 0.0, 1)
    remove(group, table, keys[1:2])
    for _ in snapshot.blocks(0):
        pass
    snapshot.close()
