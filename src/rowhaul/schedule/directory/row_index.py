"""A growing map from rows (table, key) to small integers.

Open addressing with linear probing over pairs of 64-bit words: the key, then (table << 32 | value + 1); an
all-zero second word is an empty place. One probe is one cache line. Where a row is depends on a secret of the
process (`rowhaul._scramble`), and nothing else does: `RowIndex.items` lists rows in order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul._memory import leading_zeros, prefetch_to_read
from rowhaul._scramble import placed_row
from rowhaul.schedule.arrays import zeros

SMALLEST = 1024
_LOW = np.int64(0xFFFFFFFF)
_AHEAD = 16  # rows between asking for a cache line and using it


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
            larger = zeros(2 * capacity, np.int64, room_to_grow=1).reshape(capacity, 2)
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
        """Set the values of rows, new or not; the map must have room."""
        index_fill(self.places, tables, keys, values)


@kernel
def index_place(index, table, key):
    """Where the search for a row begins."""
    return np.int64(placed_row(table, key) >> np.uint64(leading_zeros(np.uint64(len(index) - 1))))


@kernel
def index_find(index, table, key):
    """The place of a row in the index; its second word is 0 if the row is not there."""
    mask = np.int64(len(index) - 1)
    place = index_place(index, table, key)
    while True:
        word = index[place, 1]
        if word == 0 or (index[place, 0] == key and (word >> 32) == table):
            return place
        place = (place + 1) & mask


@kernel
def index_value(word):
    """The value in a place's second word; -1 if the place is empty."""
    return (word & _LOW) - 1


@kernel
def index_set(index, place, table, key, value):
    """Write a row and its value into a place found by `index_find`."""
    index[place, 0] = key
    index[place, 1] = (np.int64(table) << 32) | (np.int64(value) + 1)


@kernel
def index_delete(index, place):
    """Empty a place and close the gap: later rows of the run move up, so that no tombstones remain."""
    mask = np.int64(len(index) - 1)
    hole = place
    probe = (place + 1) & mask
    while index[probe, 1] != 0:
        wanted = index_place(index, index[probe, 1] >> 32, index[probe, 0])
        if ((probe - wanted) & mask) >= ((probe - hole) & mask):
            index[hole, 0] = index[probe, 0]
            index[hole, 1] = index[probe, 1]
            hole = probe
        probe = (probe + 1) & mask
    index[hole, 1] = 0


@kernel
def find_values(places, tables, keys):
    """The values of rows in an index, -1 for absent ones."""
    count = len(keys)
    address = np.int64(places.ctypes.data)
    values = np.empty(count, np.int32)
    for r in range(count):
        if r + _AHEAD < count:
            soon = index_place(places, tables[r + _AHEAD], keys[r + _AHEAD])
            prefetch_to_read(address + soon * 16)
        values[r] = index_value(places[index_find(places, tables[r], keys[r]), 1])
    return values


@kernel
def index_rehash(old, new):
    """Copy all rows of one index into an empty, larger one."""
    for place in range(len(old)):
        word = old[place, 1]
        if word != 0:
            at = index_find(new, word >> 32, old[place, 0])
            new[at, 0] = old[place, 0]
            new[at, 1] = word


@kernel
def index_items(index):
    """The tables, keys and values of all rows of an index, in no particular order."""
    count = 0
    for place in range(len(index)):
        count += index[place, 1] != 0
    tables = np.empty(count, np.int32)
    keys = np.empty(count, np.int64)
    values = np.empty(count, np.int64)
    at = 0
    for place in range(len(index)):
        word = index[place, 1]
        if word != 0:
            tables[at] = word >> 32
            keys[at] = index[place, 0]
            values[at] = index_value(word)
            at += 1
    return tables, keys, values


@kernel
def index_fill(index, tables, keys, values):
    """Write rows and their values into an index that has room for them."""
    for r in range(len(keys)):
        index_set(index, index_find(index, tables[r], keys[r]), tables[r], keys[r], values[r])
