"""A growing map from rows (table, key) to small integers; the kernels beside it do the probing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.directory.finding_kernels import find_values
from rowhaul.schedule.directory.index_kernels import index_fill, index_items, index_rehash

SMALLEST = 1024


class RowIndex:
    """The memory of a map from rows to integers, at most half full.

    Kernels read and write ``places`` themselves; `reserve` must make room before they insert.
    """

    def __init__(self) -> None:
        self.places: npt.NDArray[np.int64] = np.zeros((SMALLEST, 2), np.int64)

    def reserve(self, num_rows: int) -> None:
        """Make room for this many rows in all."""
        capacity = len(self.places)
        while capacity < 2 * num_rows:
            capacity *= 2
        if capacity > len(self.places):
            larger = np.zeros((capacity, 2), np.int64)
            index_rehash(self.places, larger)
            self.places = larger

    def find(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The values of rows, -1 of those that are not there."""
        values: npt.NDArray[np.int32] = find_values(self.places, tables, keys)
        return values

    def items(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """All rows by (table, key), and their values: tables, keys, values."""
        tables, keys, values = index_items(self.places)
        order = np.lexsort((keys, tables))
        return tables[order], keys[order], values[order]

    def add(
        self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64], values: npt.NDArray[np.int64]
    ) -> None:
        """Put rows into an empty map."""
        self.reserve(len(keys))
        self.add_more(tables, keys, values)

    def add_more(
        self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64], values: npt.NDArray[np.int64]
    ) -> None:
        """Put rows into a map that has room for them; those that are there get other values."""
        index_fill(self.places, tables, keys, values)
