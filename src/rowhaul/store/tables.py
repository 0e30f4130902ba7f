"""Tables of embedding rows: raw keys in, records out, created on first sight.

Tables whose records have the same layout form a group with one index and one arena, so a batch
over dozens of features is a handful of compiled passes instead of dozens of calls each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rowhaul.errors import UnknownKeyError
from rowhaul.optim import RecordMemory, RowOptimizerRule
from rowhaul.store.arena import RecordArena
from rowhaul.store.distinct import Lookup, distinct_keys
from rowhaul.store.index import Int64s, KeyIndex
from rowhaul.store.keyed import add_absent, find_or_add, locate_or_add
from rowhaul.store.location import ABSENT
from rowhaul.store.records import write_initial

_BLOCK_ROWS = 1 << 16  # rows copied at a time when a table is read whole
ON_UNKNOWN = ("init", "default", "error")


@dataclass(frozen=True)
class TableSpec:
    """A table's name, row size and the range its rows start in."""

    name: str
    dim: int
    initial_low: float
    initial_high: float


def table_seeds(tables: Sequence[TableSpec], seed: int) -> npt.NDArray[np.uint64]:
    """Return the seed of each table's rows."""
    # The name, not the position, so that adding a table does not change the others' rows.
    seeds = [xxhash.xxh64_intdigest(table.name.encode(), seed=seed & (2**64 - 1)) for table in tables]
    return np.array(seeds, dtype=np.uint64)


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
        self._seeds = table_seeds(tables, seed)
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
        keys, key_starts, inverse = self.distinct(values, starts, feature_tables)
        spare = np.empty((0, self.dim), dtype=self.dtype)
        if insert:
            return Lookup(keys, key_starts, inverse, self.find_or_make(keys, key_starts), spare)
        locations, num_absent = self.index.find(keys, key_starts)
        if num_absent:
            absent = np.flatnonzero(locations < 0)
            spare = self._unknown_rows(keys, key_starts, absent, on_unknown)
            locations[absent] = -1 - np.arange(len(absent))
        return Lookup(keys, key_starts, inverse, locations, spare)

    def distinct(
        self, values: Int64s, starts: Int64s, feature_tables: Int64s
    ) -> tuple[Int64s, Int64s, npt.NDArray[np.int32]]:
        """The distinct keys of a batch, given as to `lookup`, table by table; their starts; each id's key."""
        return distinct_keys(values, starts, feature_tables, len(self.tables))

    def make_fresh(self, tables: Int64s, keys: Int64s) -> Int64s:
        """Locations of rows; missing ones are created with their initial values."""
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
        """The same for distinct rows given table by table; ``unwritten`` ones get no values."""
        locations, new = find_or_add(self, keys, starts)
        if len(new):
            if unwritten is not None:
                new = new[~unwritten[new]]
            self._write_initial(self.arena, locations[new], keys, starts, new)
        return locations

    def make(self, keys: Int64s, starts: Int64s, *, unwritten: npt.NDArray[np.bool_]) -> Int64s:
        """The same for rows that were looked up before: none may exist."""
        locations = np.full(len(keys), ABSENT)
        add_absent(self, keys, starts, locations, len(keys))
        new = np.flatnonzero(~unwritten)
        self._write_initial(self.arena, locations[new], keys, starts, new)
        return locations

    def update(self, records: Int64s, gradients: npt.NDArray[Any], lr: float, number: int) -> None:
        """One optimizer step on the given records, which must differ."""
        # Kernels take the gradients' type for that of the records, which they find by address.
        gradients = np.asarray(gradients, dtype=self.dtype)
        self.arena.before_change(records)
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
        locations, _ = find_or_add(self, keys, starts)
        self.arena.write(locations, contents)

    def clear(self) -> None:
        """Forget every row."""
        self.index = KeyIndex(len(self.tables))
        self.arena = RecordArena(self.arena.width, self.dtype)

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
