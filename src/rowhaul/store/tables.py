"""Tables of embedding rows: raw keys in, records out, created on first sight.

Tables whose records have the same layout form a group with one index and one arena, so a batch
over dozens of features is a handful of compiled passes instead of dozens of calls each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rowhaul.errors import UnknownKeyError
from rowhaul.optim import RecordMemory, RowOptimizerRule
from rowhaul.store.arena import OutOfMemoryError, RecordArena
from rowhaul.store.index import Int64s, KeyIndex
from rowhaul.store.keyed import locate_or_add
from rowhaul.store.record_kernels import deduplicate, write_initial

_BLOCK_ROWS = 1 << 16  # rows copied at a time when a table is read whole
ON_UNKNOWN = ("init", "default", "error")


_of_thread = threading.local()


def _zeros(at_least: int) -> npt.NDArray[np.int32]:
    """Scratch slots, a power of two of them, kept from call to call: whoever borrows leaves zeros."""
    kept: npt.NDArray[np.int32] | None = getattr(_of_thread, "zeros", None)
    if kept is None or len(kept) < max(16, at_least):
        kept = _of_thread.zeros = np.zeros(1 << max(12, at_least.bit_length()), dtype=np.int32)
    return kept


@dataclass(frozen=True)
class TableSpec:
    """A table's name, row size and the range its rows start in."""

    name: str
    dim: int
    initial_low: float
    initial_high: float


@dataclass(frozen=True)
class Lookup:
    """Where the rows of one batch are: the ticket that reads and updates go by.

    ``inverse`` maps every id of the batch to its distinct row; a location ``-1 - k`` means row
    ``k`` of ``spare``: one that is not stored.
    """

    keys: Int64s  # distinct keys, table by table
    starts: Int64s  # tables + 1: where each table's keys begin
    inverse: npt.NDArray[np.int32]  # ids of the batch
    locations: Int64s  # distinct keys
    spare: npt.NDArray[Any]  # rows not stored x dim


def distinct_keys(
    values: Int64s, starts: Int64s, feature_tables: Int64s, num_tables: int
) -> tuple[Int64s, Int64s, npt.NDArray[np.int32]]:
    """The distinct keys of a batch, table by table; where each table's begin; the key of each id.

    Feature ``f`` has ``values[starts[f]:starts[f + 1]]``, of table ``feature_tables[f]``, which ascends.
    """
    unique = np.empty(len(values), dtype=np.int64)
    inverse = np.empty(len(values), dtype=np.int32)
    key_starts = np.empty(num_tables + 1, dtype=np.int64)
    num_unique = deduplicate(
        values, starts, feature_tables, _zeros(2 * len(values)), unique, inverse, key_starts
    )
    return unique[:num_unique], key_starts, inverse


class _OneChunk:
    """The rows of an array in the form that kernels find records by."""

    def __init__(self, rows: npt.NDArray[Any]) -> None:
        self.addresses = np.array([rows.ctypes.data])
        self.shift = 62  # every record number is in the first chunk
        self.width = rows.shape[1]


class TableGroup:
    """Tables of equal row size under one row optimizer.

    Lookups that insert nothing may run in several threads; anything else in one at a time.
    """

    def __init__(
        self, tables: Sequence[TableSpec], optimizer: RowOptimizerRule, dtype: npt.DTypeLike, seed: int
    ) -> None:
        self.tables, self.optimizer = tuple(tables), optimizer
        self.dim = tables[0].dim
        self.index = KeyIndex(len(tables))
        self.arena = RecordArena(self.dim + optimizer.state_width(self.dim), dtype)
        # The name, not the position, so that adding a table does not change the others' rows.
        seeds = [xxhash.xxh64_intdigest(table.name.encode(), seed=seed & (2**64 - 1)) for table in tables]
        self._seeds = np.array(seeds, dtype=np.uint64)
        self._lows = np.array([table.initial_low for table in tables])
        self._steps = np.array([(table.initial_high - table.initial_low) / 2**24 for table in tables])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of values and state."""
        return self.arena.dtype

    @property
    def allocated_bytes(self) -> int:
        """Bytes held by records and index."""
        return self.arena.allocated_bytes + self.index.allocated_bytes

    def lookup(
        self,
        values: Int64s,
        starts: Int64s,
        feature_tables: Int64s,
        *,
        insert: bool,
        on_unknown: str = "init",
    ) -> Lookup:
        """Locate the rows of a batch: feature ``f`` reads ``values[starts[f]:starts[f + 1]]``.

        They come from table ``feature_tables[f]``; features are ordered by table. Unknown keys are
        inserted as fresh rows, or else read as ``on_unknown`` says without being inserted.
        """
        keys, key_starts, inverse = self._distinct(values, starts, feature_tables)
        locations, num_absent = self.index.find(keys, key_starts)
        num_unknown = int(num_absent)
        spare = np.empty((0, self.dim), dtype=self.dtype)
        if num_unknown and insert:
            absent = self._insert(keys, key_starts, locations, num_absent)
            self._write_initial(self.arena, locations[absent], keys, key_starts, absent)
        elif num_unknown:
            absent = np.flatnonzero(locations < 0)
            spare = self._unknown_rows(keys, key_starts, absent, on_unknown)
            locations[absent] = -1 - np.arange(num_unknown)
        return Lookup(keys, key_starts, inverse, locations, spare)

    def distinct(
        self, values: Int64s, starts: Int64s, feature_tables: Int64s
    ) -> tuple[Int64s, Int64s, npt.NDArray[np.int32]]:
        """The distinct keys of a batch, given as to `lookup`, table by table; their starts; each id's key."""
        return self._distinct(values, starts, feature_tables)

    def make_fresh(self, tables: Int64s, keys: Int64s) -> Int64s:
        """Where rows are that may not exist yet: those that do not are made with their first values."""
        locations, added = locate_or_add(self, tables, keys)
        if len(added):
            added = added[np.argsort(tables[added], kind="stable")]
            new_keys = keys[added]
            starts = np.searchsorted(tables[added], np.arange(len(self.tables) + 1))
            self._write_initial(self.arena, locations[added], new_keys, starts, np.arange(len(added)))
        return locations

    def find_or_make(
        self, keys: Int64s, starts: Int64s, *, unwritten: npt.NDArray[np.bool_] | None = None
    ) -> Int64s:
        """The same for rows given table by table, all different; some may be left without any values."""
        locations, num_absent = self.index.find(keys, starts)
        if num_absent.any():
            new = self._insert(keys, starts, locations, num_absent)
            if unwritten is not None:
                new = new[~unwritten[new]]
            self._write_initial(self.arena, locations[new], keys, starts, new)
        return locations

    def make(self, keys: Int64s, starts: Int64s, *, unwritten: npt.NDArray[np.bool_]) -> Int64s:
        """The same for rows of which none is there: they were looked up before."""
        records = self.arena.allocate(len(keys))
        locations = self._add(keys, starts, np.arange(len(keys)), records)
        assert np.array_equal(locations, records), "a row that was to be made is there"
        new = np.flatnonzero(~unwritten)
        self._write_initial(self.arena, locations[new], keys, starts, new)
        return locations

    def update(self, records: Int64s, gradients: npt.NDArray[Any], lr: float, number: int) -> None:
        """One optimizer step on the given records, which must differ."""
        # Kernels take the gradients' type for that of the records, which they find by address.
        gradients = np.asarray(gradients, dtype=self.dtype)
        self.optimizer.step(self.arena, records, gradients, lr, number)

    def blocks(self, table: int) -> Iterator[tuple[Int64s, npt.NDArray[Any]]]:
        """All rows of a table as blocks of (keys, records), values before state in each record."""
        for keys, records in self.index.blocks(table):
            for first in range(0, len(keys), _BLOCK_ROWS):
                some = slice(first, first + _BLOCK_ROWS)
                yield keys[some], self.arena.read(records[some])

    def load(self, table: int, keys: Int64s, contents: npt.NDArray[Any]) -> None:
        """Set rows of a table, known or not, to the given records; ``keys`` must differ."""
        starts = np.where(np.arange(len(self.tables) + 1) > table, len(keys), 0)
        locations, num_absent = self.index.find(keys, starts)
        self._insert(keys, starts, locations, num_absent)
        self.arena.write(locations, contents)

    def clear(self) -> None:
        """Forget every row."""
        self.index = KeyIndex(len(self.tables))
        self.arena = RecordArena(self.arena.width, self.dtype)

    def _distinct(
        self, values: Int64s, starts: Int64s, feature_tables: Int64s
    ) -> tuple[Int64s, Int64s, npt.NDArray[np.int32]]:
        return distinct_keys(values, starts, feature_tables, len(self.tables))

    def _insert(self, keys: Int64s, starts: Int64s, locations: Int64s, num_absent: np.int64) -> Int64s:
        """Give every absent key a record, all or none, and say which keys those are."""
        absent = np.flatnonzero(locations < 0)
        locations[absent] = self._add(keys, starts, absent, self.arena.allocate(int(num_absent)))
        return absent

    def _add(self, keys: Int64s, starts: Int64s, absent: Int64s, records: Int64s) -> Int64s:
        """Give the keys at some positions the given records, all or none; what they have afterwards."""
        try:
            return self.index.add(keys, starts, absent, records)
        except MemoryError:
            self.arena.release(records)
            message = f"no memory for the index of {self.arena.num_records:,} rows; use a larger machine"
            raise OutOfMemoryError(message) from None

    def _write_initial(
        self, memory: RecordMemory, records: Int64s, keys: Int64s, starts: Int64s, which: Int64s
    ) -> None:
        state = np.array([self.optimizer.initial_state], dtype=self.dtype)
        write_initial(
            memory.addresses, memory.shift, memory.width, records, keys, starts, which,
            self._seeds, self._lows, self._steps, self.dim, state,
        )  # fmt: skip

    def _unknown_rows(
        self, keys: Int64s, starts: Int64s, absent: Int64s, on_unknown: str
    ) -> npt.NDArray[Any]:
        if on_unknown == "error":
            table = self.tables[int(np.searchsorted(starts, absent[0], side="right")) - 1]
            raise UnknownKeyError(
                f"table {table.name!r}: key {int(keys[absent[0]])} was never trained "
                f"({len(absent)} such keys in this batch); train on it, or set on_unknown to "
                f"'init' or 'default'"
            )
        if on_unknown == "default":
            return np.zeros((len(absent), self.dim), dtype=self.dtype)
        rows = np.empty((len(absent), self.dim), dtype=self.dtype)
        self._write_initial(_OneChunk(rows), np.arange(len(absent)), keys, starts, absent)
        return rows
