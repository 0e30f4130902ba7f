"""The rows of tables that forget: when each was named last, and how often. 64 to 96 bytes a row.

An entry is 32 bytes and its place in the index, which is a quarter to half full, 32 to 64; with ``lfu``
a heap takes 24 to 48 more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.directory.index import RowIndex
from rowhaul.schedule.growing import extended, extended_stack
from rowhaul.schedule.lifetimes import age_lists as kernels
from rowhaul.schedule.lifetimes.heap import FrequencyHeap
from rowhaul.schedule.lifetimes.policy import RowPolicy
from rowhaul.schedule.lifetimes.status import Status

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Rows = tuple[Int32s, Int64s]  # tables, keys

ENTRY = np.dtype(
    [
        ("key", np.int64),
        ("table", np.int32),
        ("last", np.int32),  # the last iteration that named the row
        ("count", np.int32),  # samples that have named it since it came
        ("born", np.int32),  # the iteration that admitted it, or `kernels.NOT_YET`
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
        self._ttl = np.array([one.ttl or 0 for one in policies], np.int64)
        self._max_rows = np.array([one.max_rows or 0 for one in policies], np.int64)
        self._lru = np.array([one.max_rows is not None and one.evict == "lru" for one in policies])
        lfu = [table for table, one in enumerate(policies) if one.max_rows is not None and one.evict == "lfu"]
        self._heaps = {table: FrequencyHeap() for table in lfu}
        self._index = RowIndex()
        self._entries: npt.NDArray[np.void] = np.zeros(0, ENTRY)
        self._free: Int32s = np.zeros(0, np.int32)
        self._num_free = 0
        # Tables x (waiting, known): the first and last entry of each list, and its length.
        self._ends = np.full((len(policies), 2, 2), kernels.NONE, np.int32)
        self._sizes = np.zeros((len(policies), 2), np.int64)
        self._in_order = True  # by last use: the lists, while nothing was added but by `see`

    @property
    def memory_bytes(self) -> int:
        """Bytes that all of it takes."""
        heaps = sum(heap.memory_bytes for heap in self._heaps.values())
        return self._entries.nbytes + self._free.nbytes + self._index.places.nbytes + heaps

    @property
    def num_known(self) -> Int64s:
        """Tables: rows that are admitted."""
        return self._sizes[:, 1].copy()

    def see(self, iteration: int, tables: Int32s, keys: Int64s, occurrences: Int32s) -> npt.NDArray[np.uint8]:
        """Note that a batch names rows; the `Status` of each."""
        self._order_lists()
        self._reserve(len(keys))
        numbers = self._index.find(tables, keys)
        status: npt.NDArray[np.uint8]
        status, self._num_free = kernels.touch(
            iteration, tables, keys, occurrences, numbers, self._index.places, self._entries, self._free,
            self._num_free, self._ends, self._sizes, self._admit_after,
        )  # fmt: skip
        for table, heap in self._heaps.items():
            part = slice(*np.searchsorted(tables, [table, table + 1]))
            admitted = numbers[part][status[part] == Status.ADMITTED]
            if len(admitted):
                heap.push(self._entries, admitted, int(self._sizes[table, 1]))
        return status

    def expire(self, iteration: int) -> Rows:
        """Forget rows that were not named for too long, admitted or not; returns those that were known."""
        self._order_lists()
        arguments = iteration, self._entries, self._ends, self._ttl
        self._remove(kernels.due(*arguments, 0))
        return self._remove(kernels.due(*arguments, 1))

    def keep_limits(self) -> Rows:
        """Forget known rows of tables that have too many; returns them."""
        excess = np.maximum(self._sizes[:, 1] - self._max_rows, 0)
        parts = [self._remove(kernels.oldest(self._entries, self._ends, np.where(self._lru, excess, 0)))]
        for table, heap in self._heaps.items():
            if excess[table]:
                parts.append(self._remove(heap.pop(self._entries, int(excess[table]))))
        return np.concatenate([rows[0] for rows in parts]), np.concatenate([rows[1] for rows in parts])

    def drop(self, tables: Int32s, keys: Int64s) -> None:
        """Know nothing of these rows any more."""
        numbers = self._index.find(tables, keys)
        self._remove(numbers[numbers >= 0])

    def add(
        self, tables: Int32s, keys: Int64s, last: Int32s, count: Int32s, admitted: npt.NDArray[np.bool_]
    ) -> None:
        """Take in rows with what is known of them; those that are here already stay as they are, unless
        they wait and come admitted.
        """
        numbers = self._index.find(tables, keys)
        here = numbers >= 0
        waits = np.zeros(len(keys), np.bool_)
        waits[here] = self._entries["born"][numbers[here]] == kernels.NOT_YET
        replaced = waits & admitted
        self._remove(numbers[replaced])
        new = np.flatnonzero(~here | replaced)
        tables, keys, last, count, admitted = tables[new], keys[new], last[new], count[new], admitted[new]
        self._reserve(len(keys))
        self._num_free -= len(keys)
        numbers = self._free[self._num_free : self._num_free + len(keys)].copy()
        self._index.add_more(tables, keys, numbers.astype(np.int64))
        born = np.where(admitted, np.maximum(last, 0), kernels.NOT_YET)
        for name, column in (
            ("table", tables),
            ("key", keys),
            ("last", last),
            ("count", count),
            ("born", born),
        ):
            self._entries[name][numbers] = column
        kernels.append_all(numbers, self._entries, self._ends, self._sizes)
        self._in_order = False
        for table, heap in self._heaps.items():
            heap.push(self._entries, numbers[admitted & (tables == table)], int(self._sizes[table, 1]))

    def all(self) -> tuple[Int32s, Int64s, Int32s, Int32s, npt.NDArray[np.bool_]]:
        """Everything by (table, key), as `add` takes it."""
        numbers = kernels.listed(self._entries, self._ends, int(self._sizes.sum()))
        columns = [self._entries[name][numbers] for name in ("table", "key", "last", "count", "born")]
        order = np.lexsort((columns[1], columns[0]))
        tables, keys, last, count, born = (column[order] for column in columns)
        return tables, keys, last, count, born != kernels.NOT_YET

    def _order_lists(self) -> None:
        """Put all entries in the order of their last uses again, where some did not come in it."""
        if self._in_order:
            return
        self._in_order = True
        numbers = kernels.listed(self._entries, self._ends, int(self._sizes.sum()))
        key, last = self._entries["key"][numbers], self._entries["last"][numbers]
        self._ends[:], self._sizes[:] = kernels.NONE, 0
        kernels.append_all(numbers[np.lexsort((key, last))], self._entries, self._ends, self._sizes)

    def _remove(self, numbers: Int32s) -> Rows:
        if not len(numbers):
            return NO_ROWS
        tables, keys, self._num_free = kernels.remove(
            numbers, self._index.places, self._entries, self._free, self._num_free, self._ends, self._sizes
        )
        return tables, keys

    def _reserve(self, more: int) -> None:
        if more > self._num_free:
            old = len(self._entries)
            total = max(_FIRST_ENTRIES, 2 * old, old + more)
            self._entries = extended(self._entries, total)
            self._entries["born"][old:] = kernels.NOT_YET
            self._free = extended_stack(self._free, self._num_free, total)
            self._num_free += total - old
        self._index.reserve(len(self._entries) - self._num_free + more)
