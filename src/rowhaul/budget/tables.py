"""Tables of one row size within a budget, in this process: a map of slots, and the records behind it.

Slot ``s`` is record ``s``; the shared rows of all tables come behind the slots, table by table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.budget.slot_kernels import count_ids, locate_rows
from rowhaul.budget.slots import FoundRows, HandOver, Int64s, Seated, SlotMap
from rowhaul.errors import CheckpointError
from rowhaul.optim import RowOptimizerRule
from rowhaul.store import Lookup, TableGroup, TableSpec
from rowhaul.store.arena import FixedArena
from rowhaul.store.distinct import distinct_keys
from rowhaul.store.packing import PLAIN

_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class FoundIds:
    """The distinct ids of a batch, table by table, and the rows that they read."""

    keys: Int64s
    inverse: npt.NDArray[np.int32]  # each id's key
    found: FoundRows
    version: int  # of the rows behind the map that they were found in
    num_seated: int  # by that map so far


class SlotTables(TableGroup):
    """Tables of one row size whose rows are slots and shared rows; the index of keys is not used.

    Args:
        tables: names, sizes and initial ranges.
        optimizer: of rows.
        dtype: of values and state.
        seed: of first values.
        slots: which ids have a row of their own.
        row_dtype: what values are held in.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: RowOptimizerRule,
        dtype: npt.DTypeLike,
        seed: int,
        slots: SlotMap,
        row_dtype: str = PLAIN,
    ) -> None:
        super().__init__(tables, optimizer, dtype, seed, row_dtype)
        self.map = slots
        self.version = 0  # after each change of the map: what was found before is found again
        self.num_seated = 0  # ids that took an empty slot: what was found before is found again, too
        self._begin()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all records, used or not, and of the map."""
        return self.arena.allocated_bytes + self.map.allocated_bytes

    def find(self, values: Int64s, starts: Int64s, feature_tables: Int64s) -> FoundIds:
        """Find the rows of a batch, given as to `TableGroup.lookup`; in any thread."""
        version = self.version, self.num_seated
        keys, key_starts, inverse = self.distinct(values, starts, feature_tables)
        return FoundIds(keys, inverse, self.map.find(keys, key_starts), *version)

    def refresh(self, ids: FoundIds) -> FoundIds:
        """Find rows again if any have changed hands, or were taken, since."""
        version = self.version, self.num_seated
        if (ids.version, ids.num_seated) == version:
            return ids
        return FoundIds(ids.keys, ids.inverse, self.map.find(ids.keys, ids.found.starts), *version)

    def rows_of(self, ids: FoundIds) -> Lookup:
        """Locate the distinct rows of ids, of which several may read the same; keys are rows' names."""
        starts, every = ids.found.starts, np.arange(len(self.tables))
        rows, row_starts, row_of_key = distinct_keys(ids.found.rows, starts, every, len(every))
        locations = np.empty(len(rows), np.int64)
        locate_rows(rows, row_starts, self._first_shared, locations)
        nothing = np.empty((0, self.dim), self.dtype)
        return Lookup(rows, row_starts, np.take(row_of_key, ids.inverse), locations, nothing)

    def begin_batch(self, parts: Sequence[FoundIds]) -> list[FoundIds]:
        """Before a whole batch is read: give its ids empty slots, and count its accesses.

        Its ids come, as just found, in parts of some tables each, in order, and return with their rows.
        """
        parts = list(parts)
        accesses = np.concatenate([_accesses(part) for part in parts])
        seated = self.map.seat(_together(parts), accesses)
        if len(seated.slots):
            self.num_seated += len(seated.slots)
            self._make(seated)
            parts = [self.refresh(part) for part in parts]
        self.map.count(_together(parts), accesses)
        return parts

    def _make(self, seated: Seated) -> None:
        """Make the rows of slots that were empty."""
        order = np.argsort(seated.tables, kind="stable")
        starts = np.searchsorted(seated.tables[order], np.arange(len(self.tables) + 1))
        names = seated.slots[order]
        self._write_initial(self.arena, names, names, starts, np.arange(len(names)))

    def change(self, now: int) -> HandOver:
        """After ``now`` steps, which is a stop: hand rows over; returns which."""
        before, first = self.map.shared_sizes, self._first_shared
        over = self.map.change(now)
        self.version += 1
        values = self.arena.read(self.locate(over.tables, over.sources))
        if self.map.shared_sizes is not before:
            kept = np.minimum(before, self.map.shared_sizes)
            tables = np.repeat(np.arange(len(kept)), kept)
            rows = np.concatenate([-1 - np.arange(count) for count in kept])
            records = self.arena.read(first[tables] - 1 - rows)
            self._lay_out()
            self.arena.write(self.locate(tables, rows), records)
        self.arena.write(self.locate(over.tables, over.rows), self._fresh(values))
        return over

    def _fresh(self, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Set the optimizer's state of records to what it begins with."""
        state = np.full((len(stored), self.width - self.dim), self.optimizer.initial_state, self.dtype)
        if self.packing is None:
            stored[:, self.dim :] = state
        else:
            stored[:, self.packing.value_bytes :] = state.view(np.uint8)
        return stored

    def locate(self, tables: npt.NDArray[Any], rows: Int64s) -> Int64s:
        """The records of rows."""
        return np.where(rows >= 0, rows, self._first_shared[tables] - 1 - rows)

    def names(self, table: int) -> Int64s:
        """The rows of a table in order: shared ones, which are negative, before slots."""
        taken = self.map.taken
        own = taken[self.map.owners[taken] == table]
        return np.concatenate([np.arange(-self.map.shared_sizes[table], 0), own])

    def blocks(self, table: int) -> Iterator[tuple[Int64s, npt.NDArray[Any]]]:
        """All rows of a table as blocks of (names, stored records)."""
        names = self.names(table)
        for first in range(0, len(names), _BLOCK_ROWS):
            some = names[first : first + _BLOCK_ROWS]
            yield some, self.arena.read(self.locate(np.full(len(some), table), some))

    def load_stored(self, table: int, keys: Int64s, stored: npt.NDArray[Any]) -> None:
        """Set rows of a table that the map knows, by their names."""
        is_known = (keys < 0) & (keys >= -self.map.shared_sizes[table])
        slots = np.flatnonzero((keys >= 0) & (keys < self.map.room.num_slots))
        is_known[slots] = self.map.belong(keys[slots], table)
        unknown = keys[~is_known]
        if len(unknown):
            raise CheckpointError(
                f"table {self.tables[table].name!r}: its map of slots has no row {int(unknown[0])}, and "
                f"{len(unknown)} such rows are given; rows and map must be of one checkpoint"
            )
        self.arena.write(self.locate(np.full(len(keys), table), keys), stored)

    def clear(self) -> None:
        """Forget every row."""
        self.map.clear()
        self.begin()

    def begin(self) -> None:
        """Make all records of the map anew: shared rows as rows of their names begin, slots of zeros."""
        self.version += 1
        self._begin()

    def _begin(self) -> None:
        """Make records anew: shared rows as rows of their names begin, slots of zeros."""
        self._lay_out()
        self.arena = FixedArena(self.map.room.num_records, self.arena.width, self.arena.dtype)
        sizes = self.map.shared_sizes
        names = np.concatenate([-1 - np.arange(size) for size in sizes])
        tables = np.repeat(np.arange(len(sizes)), sizes)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        self._write_initial(self.arena, self.locate(tables, names), names, starts, np.arange(len(names)))

    def _lay_out(self) -> None:
        sizes = self.map.shared_sizes
        self._first_shared: Int64s = self.map.room.num_slots + np.cumsum(sizes) - sizes


def _accesses(ids: FoundIds) -> Int64s:
    counts = np.zeros(len(ids.keys), np.int64)
    count_ids(ids.inverse, counts)
    return counts


def _together(parts: Sequence[FoundIds]) -> FoundRows:
    found = [part.found for part in parts]
    if len(found) == 1:
        return found[0]
    return FoundRows(
        np.sum([one.starts for one in found], axis=0),
        np.concatenate([one.rows for one in found]),
        np.concatenate([one.hashed for one in found]),
    )
