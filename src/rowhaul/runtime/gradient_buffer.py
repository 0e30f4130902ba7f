"""Buffers for the gradients of a worker until their step, by (table, key).

Thousands are added and removed in every iteration, by one thread, and few are held at a time. So a buffer has
an index without locks and shards: one small table that stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.gradient_buffer_kernels import (
    find_gradients,
    put_gradients,
    remove_gradients,
    write_gradients,
)
from rowhaul.schedule.directory.row_index import RowIndex
from rowhaul.store.arena import RecordArena

Int64s = npt.NDArray[np.int64]


class GradientBuffer:
    """Vectors of one length by (table, key)."""

    def __init__(self, num_tables: int, width: int, dtype: npt.DTypeLike) -> None:
        self.index = GradientIndex(num_tables)
        self.arena = RecordArena(width, dtype)

    def write(self, tables: Int64s, keys: Int64s, gradients: npt.NDArray[Any]) -> None:
        """Set the gradients of different rows, in any order, whether or not there are any."""
        given = np.ascontiguousarray(gradients, dtype=self.arena.dtype)
        records = self.arena.allocate(len(keys))
        num_new = self.index.write(tables, keys, records, self.arena, given)
        if num_new < len(keys):
            self.arena.release(records[num_new:])


class GradientIndex:
    """Locations of the keys of ``num_tables`` tables, for one thread; see `rowhaul.store.index.KeyIndex`."""

    def __init__(self, num_tables: int) -> None:
        self.num_tables = num_tables
        self._rows = RowIndex()
        self._count = 0

    @property
    def num_keys(self) -> Int64s:
        """Keys held, by table."""
        return np.bincount(self._rows.items()[0], minlength=self.num_tables)

    def __len__(self) -> int:
        return self._count

    def find(self, keys: Int64s, starts: Int64s) -> tuple[Int64s, np.int64]:
        """Return the location of each key, -1 where absent, and the number of absent keys."""
        locations, num_absent = find_gradients(self._rows.places, keys, starts)
        return locations, np.int64(num_absent)

    def find_each(self, tables: Int64s, keys: Int64s) -> Int64s:
        """Return the location of each key of the table given with it, -1 where absent, in any order."""
        return self._rows.find(tables.astype(np.int32), keys).astype(np.int64)

    def insert(
        self, keys: Int64s, starts: Int64s, locations: Int64s, num_absent: np.int64, records: Int64s
    ) -> Int64s:
        """Give the keys that `find` did not find, which must differ, the ``records`` in order.

        Fills in their ``locations`` and returns which keys they are.
        """
        self._rows.reserve(self._count + int(num_absent))
        self._count += int(num_absent)
        absent: Int64s = put_gradients(self._rows.places, keys, starts, locations, records)
        return absent

    def write(
        self, tables: Int64s, keys: Int64s, records: Int64s, arena: RecordArena, given: npt.NDArray[Any]
    ) -> int:
        """Write vectors to the records of rows; new rows get those given, in order. Return their number."""
        self._rows.reserve(self._count + len(keys))
        num_new = write_gradients(
            self._rows.places, tables, keys, records, arena.addresses, arena.shift, arena.record_bytes,
            given.ctypes.data,
        )  # fmt: skip
        self._count += num_new
        return int(num_new)

    def delete(self, keys: Int64s, starts: Int64s) -> Int64s:
        """Remove distinct keys and return their locations; KeyError, and none removed, if one is absent."""
        locations, num_absent = self.find(keys, starts)
        if num_absent:
            raise KeyError(int(keys[np.flatnonzero(locations < 0)[0]]))
        self.remove_found(keys, starts)
        return locations

    def remove_found(self, keys: Int64s, starts: Int64s) -> None:
        """Remove keys that `find` has found."""
        remove_gradients(self._rows.places, keys, starts)
        self._count -= len(keys)

    def by_table(self) -> Iterator[tuple[int, Int64s, Int64s]]:
        """Yield (table, keys, locations) of every table that has any, in order."""
        tables, keys, locations = self._rows.items()
        order = np.argsort(tables, kind="stable")
        numbers, firsts = np.unique(tables[order], return_index=True)
        for number, some in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=False):
            yield number, keys[some], locations[some]

    def blocks(self, table: int) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield all (keys, locations) of a table."""
        tables, keys, locations = self._rows.items()
        chosen = tables == table
        yield keys[chosen], locations[chosen]
