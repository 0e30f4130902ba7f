"""The rows of tables that forget: when each was named last, and how often. 64 to 96 bytes a row.

A row has an entry of 32 bytes and a place in the index, which is a quarter to half full, of 32 to 64; with
``lfu`` a heap takes 24 to 48 more. The entries of a table form two doubly linked lists, of rows that wait for
admission and of rows that are known, each ordered by (last use, key): the rows of a batch come in order of
their keys and go to the end. So the rows to forget for their age are at the beginning of a list.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_write
from rowhaul.schedule.arrays import extended, extended_stack
from rowhaul.schedule.directory.row_index import RowIndex, index_delete, index_find, index_place, index_set
from rowhaul.schedule.lifetimes.heap import FrequencyHeap
from rowhaul.schedule.lifetimes.policy import RowPolicy, Status

WAITING, ADMITTED, KNOWN = np.uint8(Status.WAITING), np.uint8(Status.ADMITTED), np.uint8(Status.KNOWN)
MOST_SIGHTINGS = 1 << 30  # larger counts are equal
NOT_YET = -1  # when a row that waits was admitted
NONE = -1  # no entry
_AHEAD = 16  # how many rows ahead of their use scattered memory is asked for
_FIRST, _LAST = 0, 1

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Rows = tuple[Int32s, Int64s]  # tables, keys

ENTRY = np.dtype(
    [
        ("key", np.int64),
        ("table", np.int32),
        ("last", np.int32),  # the last iteration that named the row
        ("count", np.int32),  # samples that have named it since it came
        ("born", np.int32),  # the iteration that admitted it, or `NOT_YET`
        ("previous", np.int32),
        ("next", np.int32),
    ],
    align=True,
)
_FIRST_ENTRIES = 1024
NO_ROWS: Rows = np.zeros(0, np.int32), np.zeros(0, np.int64)


class RecentRows:
    """Entries of rows that wait or are known, of the tables whose policies forget."""

    def __init__(self, policies: Sequence[RowPolicy]) -> None:
        self._admit_after = np.array([one.admit_after for one in policies], np.int64)
        self._ttl = np.array([one.ttl_iterations for one in policies], np.int64)
        self._max_rows = np.array([one.max_rows or 0 for one in policies], np.int64)
        self._lru = np.array([one.max_rows is not None and one.evict == "lru" for one in policies])
        lfu = [table for table, one in enumerate(policies) if one.max_rows is not None and one.evict == "lfu"]
        self._heaps = {table: FrequencyHeap() for table in lfu}
        self._index = RowIndex()
        self._entries: npt.NDArray[np.void] = np.zeros(0, ENTRY)
        self._free: Int32s = np.zeros(0, np.int32)
        self._num_free = 0
        # Tables x (waiting, known): the first and last entry of each list, and its length.
        self._ends = np.full((len(policies), 2, 2), NONE, np.int32)
        self._sizes = np.zeros((len(policies), 2), np.int64)
        self._in_order = True  # by last use: the lists, while nothing was added but by `see`

    @property
    def memory_bytes(self) -> int:
        """Bytes that all of it takes."""
        heaps = sum(heap.memory_bytes for heap in self._heaps.values())
        return self._entries.nbytes + self._free.nbytes + self._index.places.nbytes + heaps

    def see(self, iteration: int, tables: Int32s, keys: Int64s, occurrences: Int32s) -> npt.NDArray[np.uint8]:
        """Record that a batch names rows; returns the `Status` of each."""
        self._order_lists()
        self._reserve(len(keys))
        numbers = self._index.find(tables, keys)
        status: npt.NDArray[np.uint8]
        status, self._num_free = touch(
            iteration, tables, keys, occurrences, numbers, self._index.places, self._entries, self._free,
            self._num_free, self._ends, self._sizes, self._admit_after,
        )  # fmt: skip
        for table, heap in self._heaps.items():
            part = slice(*np.searchsorted(tables, [table, table + 1]))
            admitted = numbers[part][status[part] == Status.ADMITTED]
            if len(admitted):
                heap.push(self._entries, admitted, int(self._sizes[table, 1]))
        return status

    def expire(self, iteration: int, by_time: Int64s | None = None) -> Rows:
        """Forget rows that were not named for too long, admitted or not; returns those that were known.

        ``by_time`` are iterations, 0 for none, of tables whose rows are forgotten by event time.
        """
        self._order_lists()
        ttl = self._ttl if by_time is None else np.where(by_time > 0, by_time, self._ttl)
        arguments = iteration, self._entries, self._ends, self._sizes, ttl
        self._remove(due(*arguments, 0))
        return self._remove(due(*arguments, 1))

    def keep_limits(self) -> Rows:
        """Forget known rows of tables that have too many; returns them."""
        excess = np.maximum(self._sizes[:, 1] - self._max_rows, 0)
        parts = [self._remove(oldest(self._entries, self._ends, np.where(self._lru, excess, 0)))]
        for table, heap in self._heaps.items():
            if excess[table]:
                parts.append(self._remove(heap.pop(self._entries, int(excess[table]))))
        return np.concatenate([rows[0] for rows in parts]), np.concatenate([rows[1] for rows in parts])

    def knows(self, tables: Int32s, keys: Int64s) -> npt.NDArray[np.bool_]:
        """Whether rows are admitted, and not forgotten since."""
        numbers = self._index.find(tables, keys)
        known = numbers >= 0
        known[known] = self._entries["born"][numbers[known]] != NOT_YET
        return known

    def drop(self, tables: Int32s, keys: Int64s) -> None:
        """Drop these rows."""
        numbers = self._index.find(tables, keys)
        self._remove(numbers[numbers >= 0])
        # They may be added again, as of the iteration that admitted them: no node of then may count.
        for heap in self._heaps.values():
            heap.drop_gone(self._entries)

    def add(
        self, tables: Int32s, keys: Int64s, last: Int32s, count: Int32s, admitted: npt.NDArray[np.bool_]
    ) -> None:
        """Add rows with their last use and count; rows that are here stay as they are, unless they wait and
        are added as admitted.
        """
        numbers = self._index.find(tables, keys)
        here = numbers >= 0
        waits = np.zeros(len(keys), np.bool_)
        waits[here] = self._entries["born"][numbers[here]] == NOT_YET
        replaced = waits & admitted
        self._remove(numbers[replaced])
        new = np.flatnonzero(~here | replaced)
        tables, keys, last, count, admitted = tables[new], keys[new], last[new], count[new], admitted[new]
        self._reserve(len(keys))
        self._num_free -= len(keys)
        numbers = self._free[self._num_free : self._num_free + len(keys)].copy()
        self._index.add(tables, keys, numbers.astype(np.int64))
        born = np.where(admitted, np.maximum(last, 0), NOT_YET)
        for name, column in (
            ("table", tables),
            ("key", keys),
            ("last", last),
            ("count", count),
            ("born", born),
        ):
            self._entries[name][numbers] = column
        append_all(numbers, self._entries, self._ends, self._sizes)
        self._in_order = False
        for table, heap in self._heaps.items():
            heap.push(self._entries, numbers[admitted & (tables == table)], int(self._sizes[table, 1]))

    def all(self) -> tuple[Int32s, Int64s, Int32s, Int32s, npt.NDArray[np.bool_]]:
        """Everything by (table, key), as `add` takes it."""
        numbers = listed(self._entries, self._ends, int(self._sizes.sum()))
        columns = [self._entries[name][numbers] for name in ("table", "key", "last", "count", "born")]
        order = np.lexsort((columns[1], columns[0]))
        tables, keys, last, count, born = (column[order] for column in columns)
        return tables, keys, last, count, born != NOT_YET

    def _order_lists(self) -> None:
        """Put all entries in the order of their last uses again, where some did not come in it."""
        if self._in_order:
            return
        self._in_order = True
        numbers = listed(self._entries, self._ends, int(self._sizes.sum()))
        key, last = self._entries["key"][numbers], self._entries["last"][numbers]
        self._ends[:], self._sizes[:] = NONE, 0
        append_all(numbers[np.lexsort((key, last))], self._entries, self._ends, self._sizes)

    def _remove(self, numbers: Int32s) -> Rows:
        if not len(numbers):
            return NO_ROWS
        tables, keys, self._num_free = remove(
            numbers, self._index.places, self._entries, self._free, self._num_free, self._ends, self._sizes
        )
        return tables, keys

    def _reserve(self, more: int) -> None:
        if more > self._num_free:
            old = len(self._entries)
            total = max(_FIRST_ENTRIES, 2 * old, old + more)
            self._entries = extended(self._entries, total)
            self._entries["born"][old:] = NOT_YET
            self._free = extended_stack(self._free, self._num_free, total)
            self._num_free += total - old
        self._index.reserve(len(self._entries) - self._num_free + more)


@kernel
def touch(
    iteration, tables, keys, occurrences, numbers, places, entries, free, num_free, ends, sizes, admit_after
):
    """Record that a batch names rows, ordered by (table, key); returns the status of each.

    ``numbers`` are their entries; those that have none get one. Returns a `Status` each, and the free
    entries left.
    """
    status = np.empty(len(keys), np.uint8)
    address = np.int64(entries.ctypes.data)
    for r in range(len(keys)):
        if r + _AHEAD < len(keys) and numbers[r + _AHEAD] >= 0:
            prefetch_to_write(address + np.int64(numbers[r + _AHEAD]) * entries.itemsize)
        if numbers[r] >= 0:
            _take_out(entries, ends, sizes, numbers[r])
        else:
            num_free -= 1
            numbers[r] = free[num_free]
            index_set(places, index_find(places, tables[r], keys[r]), tables[r], keys[r], numbers[r])
            new = entries[numbers[r]]
            new.key = keys[r]
            new.table = tables[r]
            new.count = 0
            new.born = NOT_YET
        entry = entries[numbers[r]]
        entry.last = iteration
        entry.count = min(np.int64(entry.count) + occurrences[r], MOST_SIGHTINGS)
        if entry.born != NOT_YET:
            status[r] = KNOWN
        elif entry.count >= min(admit_after[tables[r]], MOST_SIGHTINGS):
            entry.born = iteration
            status[r] = ADMITTED
        else:
            status[r] = WAITING
        _append(entries, ends, sizes, numbers[r])
    return status, num_free


@kernel
def due(iteration, entries, ends, sizes, ttl, which):
    """The entries that were not named for as long as their table keeps them, table by table, oldest first."""
    found = np.empty(sizes[:, which].sum(), np.int32)
    count = 0
    for table in range(len(ttl)):
        number = ends[table, which, _FIRST] if ttl[table] > 0 else NONE
        while number != NONE and iteration - entries[number].last >= ttl[table]:
            found[count] = number
            count += 1
            number = entries[number].next
    return found[:count].copy()


@kernel
def oldest(entries, ends, excess):
    """The ``excess`` known rows of each table that were named longest ago."""
    found = np.empty(excess.sum(), np.int32)
    count = 0
    for table in range(len(excess)):
        number = ends[table, 1, _FIRST]
        for _ in range(excess[table]):
            found[count] = number
            count += 1
            number = entries[number].next
    return found


@kernel
def remove(numbers, places, entries, free, num_free, ends, sizes):
    """Forget entries; returns their tables and keys, and the free entries left."""
    tables = np.empty(len(numbers), np.int32)
    keys = np.empty(len(numbers), np.int64)
    address = np.int64(places.ctypes.data)
    for i in range(len(numbers)):
        entry = entries[numbers[i]]
        tables[i] = entry.table
        keys[i] = entry.key
        prefetch_to_write(address + index_place(places, entry.table, entry.key) * 16)
    for i in range(len(numbers)):
        _take_out(entries, ends, sizes, numbers[i])
        entries[numbers[i]].born = NOT_YET  # a heap may still have it
        index_delete(places, index_find(places, tables[i], keys[i]))
        free[num_free] = numbers[i]
        num_free += 1
    return tables, keys, num_free


@kernel
def append_all(numbers, entries, ends, sizes):
    """Put entries, in order, at the ends of their lists."""
    for number in numbers:
        _append(entries, ends, sizes, number)


@kernel
def listed(entries, ends, total):
    """All entries that are in a list."""
    found = np.empty(total, np.int32)
    count = 0
    for table in range(len(ends)):
        for which in range(2):
            number = ends[table, which, _FIRST]
            while number != NONE:
                found[count] = number
                count += 1
                number = entries[number].next
    return found


@register_jitable
def _append(entries, ends, sizes, number):
    """Put an entry at the end of the list that it belongs to."""
    entry = entries[number]
    which = 1 if entry.born != NOT_YET else 0
    last = ends[entry.table, which, _LAST]
    entry.previous = last
    entry.next = NONE
    if last == NONE:
        ends[entry.table, which, _FIRST] = number
    else:
        entries[last].next = number
    ends[entry.table, which, _LAST] = number
    sizes[entry.table, which] += 1


@register_jitable
def _take_out(entries, ends, sizes, number):
    """Take an entry out of its list."""
    entry = entries[number]
    which = 1 if entry.born != NOT_YET else 0
    if entry.previous == NONE:
        ends[entry.table, which, _FIRST] = entry.next
    else:
        entries[entry.previous].next = entry.next
    if entry.next == NONE:
        ends[entry.table, which, _LAST] = entry.previous
    else:
        entries[entry.next].previous = entry.previous
    sizes[entry.table, which] -= 1
