"""Rows named one by one, in any order, as plans name them: found, made, removed, copied to and from bytes.

`TableGroup` answers for whole batches of features; here rows come as pairs (table, key), each once, and
leave for or arrive from the network as bytes.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rowhaul.store.arena import RecordArena
from rowhaul.store.index import Int64s, KeyIndex

Tables = npt.NDArray[np.int64]  # position of each row's table in its group


class Index(Protocol):
    """What is asked here of an index; see `KeyIndex`."""

    num_tables: int

    def find(self, keys: Int64s, starts: Int64s) -> tuple[Int64s, np.int64]:
        """Location of each key, -1 where absent, and the number of absent keys."""

    def find_each(self, tables: Int64s, keys: Int64s) -> Int64s:
        """The same for keys of any order of tables."""

    def insert(
        self, keys: Int64s, starts: Int64s, locations: Int64s, num_absent: np.int64, records: Int64s
    ) -> Int64s:
        """Give absent keys the records in order; which they are."""

    def delete(self, keys: Int64s, starts: Int64s) -> Int64s:
        """Forget keys; the locations that they had."""


class KeyedRecords(Protocol):
    """Anything that has records by key."""

    @property
    def index(self) -> Index:
        """Where they are."""

    @property
    def arena(self) -> RecordArena:
        """What they are."""


class KeyedVectors:
    """Vectors of one length by (table, key)."""

    def __init__(self, num_tables: int, width: int, dtype: npt.DTypeLike) -> None:
        self.index = KeyIndex(num_tables)
        self.arena = RecordArena(width, dtype)


def locate(records: KeyedRecords, tables: Tables, keys: Int64s) -> Int64s:
    """Where the records of rows are; -1 for those that are not there."""
    return records.index.find_each(tables, keys)


def locate_or_add(records: KeyedRecords, tables: Tables, keys: Int64s) -> tuple[Int64s, Int64s]:
    """Where the records of rows are, new ones allocated; and the positions of those that are new."""
    order = _by_table(tables)
    if order is not None:
        locations = np.empty(len(keys), np.int64)
        locations[order], added = locate_or_add(records, tables[order], keys[order])
        return locations, order[added]
    return find_or_add(records, keys, np.searchsorted(tables, np.arange(records.index.num_tables + 1)))


def find_or_add(records: KeyedRecords, keys: Int64s, starts: Int64s) -> tuple[Int64s, Int64s]:
    """The same for keys that come table by table: those of table ``t`` are ``starts[t]:starts[t + 1]``."""
    locations, num_absent = records.index.find(keys, starts)
    return locations, add_absent(records, keys, starts, locations, int(num_absent))


def add_absent(
    records: KeyedRecords, keys: Int64s, starts: Int64s, locations: Int64s, num_absent: int
) -> Int64s:
    """Allocate records for the keys that were not found, all or none, and fill in their locations.

    Returns the positions of those keys.
    """
    if not num_absent:
        return np.empty(0, np.int64)
    new = records.arena.allocate(num_absent)
    try:
        return records.index.insert(keys, starts, locations, np.int64(num_absent), new)
    except MemoryError:
        records.arena.release(new)
        raise


def remove(records: KeyedRecords, tables: Tables, keys: Int64s) -> None:
    """Forget rows, which must be there."""
    order = _by_table(tables)
    if order is not None:
        tables, keys = tables[order], keys[order]
    starts = np.searchsorted(tables, np.arange(records.index.num_tables + 1))
    locations = records.index.delete(keys, starts)
    if records.arena.keeper is not None:
        records.arena.keeper.keep_removed(tables, keys, locations)
    records.arena.release(locations)


def copy_out(
    records: KeyedRecords, locations: Int64s, lengths: Int64s, offsets: Int64s, out: npt.NDArray[np.uint8]
) -> None:
    """Copy the first bytes of each record to its offset in ``out``."""
    records.arena.copy_out(locations, lengths, offsets, out)


def copy_in(
    records: KeyedRecords, locations: Int64s, lengths: Int64s, offsets: Int64s, given: npt.NDArray[np.uint8]
) -> None:
    """Overwrite the first bytes of each record with those at its offset in ``given``."""
    records.arena.copy_in(locations, lengths, offsets, given)


def _by_table(tables: Tables) -> npt.NDArray[Any] | None:
    """The order that brings rows of one table together; None where they are in it already."""
    if len(tables) < 2 or bool((tables[1:] >= tables[:-1]).all()):
        return None
    return np.argsort(tables, kind="stable")
