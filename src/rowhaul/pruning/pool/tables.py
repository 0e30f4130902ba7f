"""Pruned tables of one row size in this process: a map of chunks, and the records of those that are there.

The map decides who has chunks; its slots are numbers of records here. A chunk's record is its values, then
the optimizer's state for them, so row optimizers step chunks as they step rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning.chunk_kernels import list_present, stored_gradients, write_initial_chunks
from rowhaul.pruning.deciding.chunk_map import ChunkMap, Pruned
from rowhaul.pruning.deciding.entries import ABSENT, ShrinkingArena, Slots
from rowhaul.pruning.deciding.located import Located
from rowhaul.pruning.deciding.room import LEAST_ENTRIES, RowCut, part_sizes
from rowhaul.pruning.narrowing import WholeRows, best_columns
from rowhaul.pruning.pool.pooling import assemble_rows
from rowhaul.pruning.settings import PruneSettings
from rowhaul.store import Lookup, TableSpec

Int64s = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]
Arrays = dict[str, Numbers]

_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class ChunkLookup(Lookup):
    """Those distinct rows of a batch that are tracked: their entries, and where their chunks are.

    In ``inverse``, -1 is an id whose row is not tracked.
    """

    counts: Int64s  # how often the batch reads each
    slots: Slots  # rows x chunks; -1: pruned
    held: Slots  # chunks that each row holds

    @property
    def tables(self) -> Int64s:
        """The table of each row."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


class PrunedTables:
    """Tables of one row size, pruned together.

    Args:
        tables: names, sizes and initial ranges.
        optimizer: of rows; to it a chunk is a row.
        dtype: of values and state.
        seed: of first values, and of pruning.
        settings: of pruning.
        budget: bytes for these tables, if there is a budget.
        least_entries: how many rows may always be tracked.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: RowOptimizerRule,
        dtype: npt.DTypeLike,
        seed: int,
        settings: PruneSettings,
        *,
        budget: int | None = None,
        least_entries: int = LEAST_ENTRIES,
    ) -> None:
        self.tables, self.optimizer, self.settings = tuple(tables), optimizer, settings
        self.dim, self.dtype = tables[0].dim, np.dtype(dtype)
        self._lows = np.array([table.initial_low for table in tables])
        self._steps = np.array([(table.initial_high - table.initial_low) / 2**24 for table in tables])
        self.has_state = True  # no longer once it only serves
        self.num_moves = 0  # how often chunks may have come to other rows
        sizes = part_sizes(self.dim, self.dim, settings, optimizer, dtype)
        names = [table.name for table in tables]
        self.map = ChunkMap(
            names, settings, sizes, seed, budget=budget, memory=self, least_entries=least_entries
        )
        self.clear()

    def clear(self) -> None:
        """Forget every row, and which columns were kept."""
        self.map.clear()
        self.iteration = 0  # steps taken
        self.awaits_columns = bool(self.settings.num_columns(self.dim))
        # Of squared gradients, by table and column, until it is decided which columns stay.
        self.squares = np.zeros((len(self.tables), self.dim if self.awaits_columns else 0))
        self._keep(np.tile(np.arange(self.dim), (len(self.tables), 1)))
        self.arena = ShrinkingArena(self.cut.width, self.dtype)
        self.num_moves += 1

    def _keep(self, columns: Int64s) -> None:
        """Store these columns of each table (tables x stored values) from now on."""
        self.columns = np.ascontiguousarray(columns)
        self.cut = RowCut(columns.shape[1], self.settings.chunks, self.optimizer, self.has_state)
        self.map.sizes = part_sizes(columns.shape[1], self.dim, self.settings, self.optimizer, self.dtype)

    @property
    def _is_scattered(self) -> bool:
        """Whether only some columns are stored."""
        return bool(self.columns.shape[1] < self.dim)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of chunks, entries and index."""
        return self.arena.allocated_bytes + self.map.allocated_bytes

    def add_new(self, located: Sequence[Located]) -> None:
        """Track the rows of a batch to train on."""
        self.map.add_new(located, self.iteration)

    def read(self, located: Located, *, counting: bool) -> ChunkLookup:
        """Find the chunks of a batch's rows, of those that are tracked; count the accesses, or do not."""
        keys, starts, inverse, entries, counts = located.known()
        if counting and self.settings.by_access:
            self.map.entries.count(entries, counts, self.iteration + 1)
        nothing, slots = np.empty((0, self.dim), self.dtype), self.map.entries.slots(entries)
        return ChunkLookup(keys, starts, inverse, entries, nothing, counts, *slots)

    def step(self, lookup: ChunkLookup, gradients: Numbers, lr: float, number: int) -> None:
        """Step the chunks of rows that are there; add to utilities, where these are of gradients."""
        stored = np.ascontiguousarray(gradients)
        if self._is_scattered:
            stored = stored_gradients(lookup.tables, self.columns, gradients)
        num_present = int(lookup.held.sum())
        for size in np.unique(self.cut.sizes):
            records = np.empty(num_present + 1, dtype=np.int64)
            firsts = np.empty(num_present + 1, dtype=np.int64)
            count = list_present(
                lookup.slots, lookup.held, self.cut.starts, size, stored.shape[1], records, firsts
            )
            self.optimizer.step_parts(
                self.arena, records[:count], stored, firsts[:count], int(size), lr, number
            )
        if not self.settings.by_access:
            self.map.entries.add_norms(lookup.locations, lookup.counts, self.cut.starts, stored, number)

    def finish_step(self, number: int) -> Pruned | None:
        """Choose columns and prune after step ``number``, if it is time."""
        self.iteration = number
        if self.awaits_columns and number >= self.settings.cold_start:
            self.narrow(best_columns(self.squares, self.settings.num_columns(self.dim)))
        return self.prune() if self.map.is_due(number) else None

    def prune(self) -> Pruned:
        """Prune now."""
        self.num_moves += 1
        return self.map.prune(self.iteration)

    def admit(self, tables: Int64s, keys: Int64s, places: Int64s) -> Int64s:
        """Make chunks as they begin: numbers of their records."""
        records = self.arena.allocate(len(keys))
        self._write_initial(self.arena, records, tables, keys, places, self.cut, self.columns)
        return records

    def evict(self, slots: Int64s) -> None:
        """Free records."""
        self.arena.release(slots)
        self.arena.sort_free()

    def narrow(self, columns: Int64s) -> None:
        """Keep these columns of each table, and rewrite all chunks."""
        before, self.awaits_columns = self.cut, False
        self.squares = np.zeros((len(self.tables), 0))
        self._keep(columns)
        for table in range(len(self.tables)):
            for keys, numbers in self._blocks(table):
                self._rewrite(table, keys, self.map.entries.slots(numbers)[0], before)
        self.arena = self.arena.narrowed(self.cut.width)
        self.num_moves += 1

    def _rewrite(self, table: int, keys: Int64s, slots: Slots, before: RowCut) -> None:
        """Put what chunks are to hold at the beginning of the records they have now."""
        whole = WholeRows(self._first_rows(table, keys), self.optimizer)
        for place in range(before.num_chunks):
            there = np.flatnonzero(slots[:, place] >= 0)
            columns = slice(int(before.starts[place]), int(before.starts[place + 1]))
            whole.put(there, columns, self.arena.read(slots[there, place].astype(np.int64)))
        for place in range(before.num_chunks):
            there = np.flatnonzero(slots[:, place] >= 0)
            kept = self.columns[table, self.cut.starts[place] : self.cut.starts[place + 1]]
            records = whole.records(there, kept)
            padded = np.zeros((len(records), self.arena.width), dtype=self.dtype)
            padded[:, : records.shape[1]] = records
            self.arena.write(slots[there, place].astype(np.int64), padded)

    def blocks(self, table: int) -> Iterator[tuple[Int64s, Numbers]]:
        """All rows of a table as blocks of (keys, values): whole rows, zeros where pruned, no state."""
        for keys, numbers in self._blocks(table):
            starts = np.where(np.arange(len(self.tables) + 1) > table, len(keys), 0)
            rows, places = self.assembled(*self.map.entries.slots(numbers), starts)
            yield keys, rows[places[1:]]

    def chunk_counts(self, table: int) -> tuple[Int64s, Int64s]:
        """Rows of a table by the number of chunks they hold, and chunks held by their place in the row."""
        by_chunks = np.zeros(self.cut.num_chunks + 1, dtype=np.int64)
        by_place = np.zeros(self.cut.num_chunks, dtype=np.int64)
        for _, numbers in self._blocks(table):
            slots, held = self.map.entries.slots(numbers)
            by_chunks += np.bincount(held, minlength=len(by_chunks))
            by_place += (slots >= 0).sum(axis=0)
        return by_chunks, by_place

    def row_blocks(self, table: int) -> Iterator[Arrays]:
        """All rows of a table as they are stored: blocks of the `chunked` format."""
        return (self.row_block(table, keys, numbers) for keys, numbers in self._blocks(table))

    def row_block(self, table: int, keys: Int64s, numbers: Int64s) -> Arrays:
        """Some rows of a table as they are stored, by the numbers of their entries."""
        slots, _ = self.map.entries.slots(numbers)
        present, utilities, touched = self.map.entries.saved(numbers)
        chunks = self.arena.read(slots[present].astype(np.int64))
        lengths = self.cut.widths[np.nonzero(present)[1]]
        chunks[np.arange(chunks.shape[1]) >= lengths[:, None]] = 0  # behind a shorter chunk is anything
        return {
            "keys": keys,
            "present": present,
            "chunks": chunks,
            "utilities": utilities,
            "touched": touched,
            "columns": self.columns[table],
            "starts": self.cut.starts,
        }

    def load_block(self, table: int, block: Mapping[str, Numbers]) -> None:
        """Add rows that are not tracked yet, as `row_blocks` gave them."""
        present, chunks = block["present"], block["chunks"]
        records = self.arena.allocate(int(np.count_nonzero(present)))
        self.arena.write(records, chunks[:, : self.arena.width])
        slots = np.full(present.shape, ABSENT, np.int32)
        slots[present] = records
        self.map.load(table, np.ascontiguousarray(block["keys"]), slots, block["utilities"], block["touched"])

    def state(self) -> Arrays:
        """What `restore` needs, beside rows."""
        known = self.map.known(self.iteration, self.awaits_columns)
        return {**known, "columns": self.columns, "sums": self.squares}

    def restore(self, known: Mapping[str, Numbers]) -> None:
        """Forget every row and continue with a `state`, once its rows are loaded, too."""
        self.clear()
        numbers = known["numbers"]
        self.map.restore(numbers, known["registers"])
        self.iteration = int(numbers[2])
        if not numbers[5]:  # they were chosen, or all are kept, whatever the settings say now
            self.narrow(known["columns"])
        elif self.awaits_columns:
            self.squares[:] = known["sums"]

    def serve(self) -> None:
        """Drop what only training needs: rows can be read and no longer trained."""
        self.has_state = False
        self._keep(self.columns)
        self.arena = self.arena.narrowed(self.cut.width)
        self.map.drop_utilities()
        self.num_moves += 1

    def assembled(self, slots: Slots, held: Slots, starts: Int64s) -> tuple[Numbers, npt.NDArray[np.int32]]:
        """The rows that hold something, behind one of zeros; and the place of each row, behind that one's."""
        arena = self.arena
        rows = np.empty((np.count_nonzero(held) + 1, self.dim), dtype=self.dtype)
        places, zeros = np.empty(len(held) + 1, dtype=np.int32), np.zeros(arena.width, dtype=self.dtype)
        assemble_rows(
            arena.addresses, arena.shift, arena.width, slots, held, zeros, self.cut.starts, starts,
            self.columns, self._is_scattered, places, rows,
        )  # fmt: skip
        return rows, places

    def _first_rows(self, table: int, keys: Int64s) -> Numbers:
        """The whole rows that keys of a table start with."""
        arena = ShrinkingArena(self.dim, self.dtype)
        rows, tables = arena.allocate(len(keys)), np.full(len(keys), table)
        whole = RowCut(self.dim, 1, self.optimizer, with_state=False)
        every = np.tile(np.arange(self.dim), (len(self.tables), 1))
        self._write_initial(arena, rows, tables, keys, np.zeros_like(rows), whole, every)
        return arena.read(rows)

    def _write_initial(
        self, arena: ShrinkingArena, records: Int64s, tables: Int64s, keys: Int64s, places: Int64s,
        cut: RowCut, columns: Int64s,
    ) -> None:  # fmt: skip
        state = np.array([self.optimizer.initial_state], dtype=self.dtype)
        write_initial_chunks(
            arena.addresses, arena.shift, arena.width, records, tables, keys, places, cut.starts,
            columns, self.map.seeds, self._lows, self._steps, cut.state_widths, state,
        )  # fmt: skip

    def _blocks(self, table: int) -> Iterator[tuple[Int64s, Int64s]]:
        """Keys of a table and the numbers of their entries."""
        for keys, numbers in self.map.index.blocks(table):
            for first in range(0, len(keys), _BLOCK_ROWS):
                some = slice(first, first + _BLOCK_ROWS)
                yield keys[some], numbers[some]
