"""Tables whose rows are kept in pieces: entries found by key, chunks in a pool shared with other tables.

An entry says where the chunks of a row are (or that they are not) and how useful they have been. It is all
that remains of a row whose chunks were pruned, and enough to notice when they should come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning.distinct_counter import DistinctCounter
from rowhaul.pruning.hashing import mixed
from rowhaul.pruning.pool.compaction import compacted
from rowhaul.pruning.pool.entry_kernels import (
    ABSENT,
    exchange_chunks,
    list_present,
    read_chunk_numbers,
    read_entries,
    stored_gradients,
    sum_squares,
    update_utilities,
    write_initial_chunks,
)
from rowhaul.pruning.pool.lookups import Chunks, Located, PrunedLookup, RowBlock, Version
from rowhaul.pruning.pool.lookups import decay_powers as decay_powers
from rowhaul.pruning.pool.pool import ChunkArena, ChunkPool
from rowhaul.pruning.pool.pooling import assemble_rows, pool_assembled, sum_gradients
from rowhaul.store.index import Int64s, KeyIndex
from rowhaul.store.keyed import add_absent
from rowhaul.store.tables import TableGroup, TableSpec

_BLOCK_ROWS = 1 << 16


class PrunedTables(TableGroup):
    """Tables of equal row size whose chunks are in ``pool``; ``arena`` holds their entries."""

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: RowOptimizerRule,
        dtype: npt.DTypeLike,
        seed: int,
        pool: ChunkPool,
    ) -> None:
        super().__init__(tables, optimizer, dtype, seed)
        self.pool = pool
        self._value_dtype = np.dtype(dtype)
        self._num_chunks = pool.num_chunks
        self.for_training = True
        self._version = Version()
        self.columns: Int64s = np.tile(np.arange(self.dim), (len(tables), 1))  # tables x stored values
        self.scattered = False  # whether only some columns are stored
        self.arena = self._empty_entries()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of values and state."""
        return self._value_dtype

    @property
    def num_entries(self) -> int:
        """Rows that have an entry, chunks or not."""
        return int(self.index.num_keys.sum())

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry, without its place in the index."""
        return self.arena.record_bytes

    def row_hashes(self, tables: Int64s, keys: Int64s) -> npt.NDArray[np.uint64]:
        """A number for each row that is the same everywhere: what its first values are drawn from."""
        return mixed(keys.view(np.uint64) ^ self._seeds[tables])

    def count_absent(self, located: Located, counter: DistinctCounter) -> int:
        """How many keys have no entry; the counter is told of them."""
        return counter.add_absent(located.keys, located.entries, located.starts, self._seeds)

    def locate(self, values: Int64s, starts: Int64s, feature_tables: Int64s) -> Located:
        """Find the entries of a batch, whose features are given as to `TableGroup.lookup`.

        May run in any thread, while others change the tables: see `refresh`.
        """
        return self.locate_keys(*self.distinct(values, starts, feature_tables))

    def locate_keys(self, keys: Int64s, starts: Int64s, inverse: npt.NDArray[np.int32]) -> Located:
        """The same for keys that are distinct already, given table by table, and the key of each id."""
        version = self._version  # from before: whatever changes meanwhile is looked at again
        return Located(keys, starts, inverse, self.index.find(keys, starts)[0], version)

    def refresh(self, located: Located) -> None:
        """Bring what was found some time ago up to date, for whoever changes the tables."""
        now = self._version
        if located.version.num_left != now.num_left:
            located.entries = self.index.find(located.keys, located.starts)[0]
        elif located.version.num_came != now.num_came:
            absent = np.flatnonzero(located.entries < 0)
            keys = np.ascontiguousarray(located.keys[absent])
            starts = np.searchsorted(absent, located.starts)
            located.entries[absent] = self.index.find(keys, starts)[0]
        located.version = now

    def add_entries(self, located: Located, which: Int64s, now: int) -> None:
        """Make entries without chunks for some of the keys that have none."""
        keys = np.ascontiguousarray(located.keys[which])
        starts = np.searchsorted(which, located.starts)
        located.entries[which] = self._new_entries(keys, starts, now)

    def read(self, located: Located) -> PrunedLookup:
        """Find the chunks of a batch's rows, of those that have an entry."""
        known = located.known()
        nothing = np.empty((0, self.dim), dtype=self.dtype)
        chunks, held = self._chunk_numbers(known.entries)
        return PrunedLookup(
            known.keys, known.starts, known.inverse, known.entries, nothing, chunks, held, known.counts
        )

    def rows(self, lookup: PrunedLookup) -> npt.NDArray[Any]:
        """Copies of those distinct rows of a batch that have an entry, zeros where pruned."""
        return self._whole_rows(lookup.chunks, lookup.held, lookup.starts)

    def pool_vectors(
        self, lookup: PrunedLookup, offsets: Int64s, columns: Int64s, is_mean: npt.NDArray[np.bool_],
        weights: npt.NDArray[Any], out: npt.NDArray[Any],
    ) -> None:  # fmt: skip
        """Write the pooled vectors of features, as `rowhaul.store.pooling.pool_rows` does."""
        rows, places = self._assembled(lookup.chunks, lookup.held, lookup.starts)
        pool_assembled(
            rows, places, lookup.inverse, offsets, columns, is_mean, weights, out, out.ctypes.data
        )  # fmt: skip

    def sum_gradients(
        self, lookup: PrunedLookup, feature_tables: Int64s, offsets: Int64s, columns: Int64s,
        is_mean: npt.NDArray[np.bool_], weights: npt.NDArray[Any], pooled: npt.NDArray[Any],
    ) -> npt.NDArray[Any]:  # fmt: skip
        """The gradients of a batch's distinct rows, of those that have an entry."""
        gradients = np.empty((len(lookup.keys), self.dim), dtype=self.dtype)
        sum_gradients(
            lookup.inverse, offsets, columns, feature_tables, lookup.starts, is_mean, weights, pooled,
            pooled.ctypes.data, gradients,
        )  # fmt: skip
        return gradients

    def step(self, lookup: PrunedLookup, gradients: npt.NDArray[Any], lr: float, number: int) -> None:
        """One optimizer step on the chunks of the given rows that are there."""
        num_present = int(lookup.held.sum())
        stored = self._stored(gradients, lookup.starts)
        for size in np.unique(self.pool.sizes):
            records = np.empty(num_present + 1, dtype=np.int64)
            firsts = np.empty(num_present + 1, dtype=np.int64)
            count = list_present(
                lookup.chunks, lookup.held, self.pool.starts, size, stored.shape[1], records, firsts
            )
            self.optimizer.step_parts(
                self.pool.arena, records[:count], stored, firsts[:count], int(size), lr, number
            )

    def learn(
        self, lookup: PrunedLookup, counts: Int64s, gradients: npt.NDArray[Any], by_gradient: bool,
        powers: npt.NDArray[np.float64], now: int,
    ) -> None:  # fmt: skip
        """Bring the utilities of rows up to step ``now``, which read each of them ``counts`` times."""
        update_utilities(
            self.arena.addresses, self.arena.shift, self.arena.width, lookup.locations, counts,
            self.pool.starts, self._stored(gradients, lookup.starts), by_gradient, powers, now,
        )  # fmt: skip

    def add_squares(self, lookup: PrunedLookup, gradients: npt.NDArray[Any], sums: npt.NDArray[Any]) -> None:
        """Add the squared gradients of each table's columns to ``sums``."""
        sum_squares(lookup.starts, gradients, sums)

    def known_rows(
        self, table: int, powers: npt.NDArray[np.float64], now: int
    ) -> Iterator[tuple[Int64s, Chunks, Any]]:
        """All entries of a table as blocks of keys, chunk numbers, and utilities after step ``now``."""
        for keys, entries in self.index.blocks(table):
            chunks = np.empty((len(keys), self._num_chunks), dtype=np.int32)
            utilities = np.empty((len(keys), self._num_chunks), dtype=np.float32)
            arena = self.arena
            read_entries(
                arena.addresses, arena.shift, arena.width, entries, powers, now, chunks, utilities
            )  # fmt: skip
            yield keys, chunks, utilities

    def evict(self, tables: Int64s, keys: Int64s, places: Int64s) -> None:
        """Give back the named chunks, which are there."""
        numbers = self._exchange(tables, keys, places, np.full(len(keys), ABSENT, dtype=np.int64))
        self.pool.give_back(numbers)

    def admit(self, tables: Int64s, keys: Int64s, places: Int64s, entries: Int64s | None = None) -> None:
        """Give the named chunks, which are not there, memory with first values and state."""
        numbers = self.pool.take(len(keys))
        self._exchange(tables, keys, places, numbers, entries)
        state = np.array([self.optimizer.initial_state], dtype=self.dtype)
        arena = self.pool.arena
        write_initial_chunks(
            arena.addresses, arena.shift, arena.width, numbers, tables, keys, places, self.pool.starts,
            self.columns, self._seeds, self._lows, self._steps, self.pool.state_widths, state,
        )  # fmt: skip

    def forget(self, tables: Int64s, keys: Int64s) -> None:
        """Drop the entries of rows, which hold no chunk; rows come table by table."""
        if not len(keys):
            return
        starts = np.searchsorted(tables, np.arange(len(self.tables) + 1))
        self.arena.release(self.index.delete(keys, starts))
        self.index = compacted(self.index)
        self._version = self._version._replace(num_left=self._version.num_left + 1)

    def blocks(self, table: int) -> Iterator[tuple[Int64s, npt.NDArray[Any]]]:
        """All rows of a table as blocks of (keys, values): whole rows, zeros where pruned, no state."""
        for keys, entries in self._entry_blocks(table):
            chunks, held = self._chunk_numbers(entries)
            yield keys, self._whole_rows(chunks, held, self._starts_of_one(table, len(keys)))

    def chunk_blocks(self, table: int) -> Iterator[tuple[Int64s, Chunks]]:
        """All rows of a table as blocks of (keys, chunk numbers)."""
        for keys, entries in self._entry_blocks(table):
            yield keys, self.arena.read(entries)[:, : self._num_chunks]

    def chunk_counts(self, table: int) -> tuple[Int64s, Int64s]:
        """Rows of a table by the number of chunks they hold, and chunks held by their place in the row."""
        by_chunks = np.zeros(self._num_chunks + 1, dtype=np.int64)
        by_place = np.zeros(self._num_chunks, dtype=np.int64)
        for _, chunks in self.chunk_blocks(table):
            by_chunks += np.bincount((chunks >= 0).sum(axis=1), minlength=self._num_chunks + 1)
            by_place += (chunks >= 0).sum(axis=0)
        return by_chunks, by_place

    def first_values(self, table: int, keys: Int64s) -> npt.NDArray[Any]:
        """The whole rows that keys of a table start with."""
        starts = self._starts_of_one(table, len(keys))
        return self._unknown_rows(keys, starts, np.arange(len(keys)), "init")

    def row_blocks(self, table: int) -> Iterator[RowBlock]:
        """All rows of a table as they are stored."""
        for keys, entries in self._entry_blocks(table):
            held = self.arena.read(entries)
            chunks = held[:, : self._num_chunks]
            present = chunks >= 0
            utilities = np.zeros(present.shape, dtype=np.float32)
            touched = np.zeros(len(keys), dtype=np.int32)
            if self.for_training:
                utilities = np.ascontiguousarray(held[:, self._num_chunks : -1]).view(np.float32)
                touched = np.ascontiguousarray(held[:, -1])
            records = self.pool.arena.read(chunks[present].astype(np.int64))
            lengths = (self.pool.sizes + self.pool.state_widths)[np.nonzero(present)[1]]
            records[np.arange(records.shape[1]) >= lengths[:, None]] = 0  # behind a shorter chunk is anything
            yield RowBlock(keys, present, records, utilities, touched)

    def load_block(self, table: int, block: RowBlock) -> None:
        """Add rows that have no entry yet, as `row_blocks` gave them."""
        entries = self._new_entries(block.keys, self._starts_of_one(table, len(block.keys)), 0)
        numbers = self.pool.arena.allocate(int(np.count_nonzero(block.present)))
        width = self.pool.arena.width
        self.pool.arena.write(numbers, block.records[:, :width])
        held = np.full((len(entries), self.arena.width), ABSENT, dtype=np.int32)
        held[:, : self._num_chunks][block.present] = numbers
        if self.for_training:
            held[:, self._num_chunks : -1] = np.ascontiguousarray(block.utilities).view(np.int32)
            held[:, -1] = block.touched
        self.arena.write(entries, held)

    def clear(self) -> None:
        """Forget every row, and which columns were kept; the pool is its owner's to clear."""
        self.columns = np.tile(np.arange(self.dim), (len(self.tables), 1))
        self.scattered = False
        self.index = KeyIndex(len(self.tables))
        self.arena = self._empty_entries()
        self._version = self._version._replace(num_left=self._version.num_left + 1)

    def drop_utilities(self) -> None:
        """Keep only what reading needs; such tables can no longer be trained."""
        self.for_training = False
        self.arena = self._entries.narrowed(self._num_chunks)

    @property
    def _entries(self) -> ChunkArena:
        assert isinstance(self.arena, ChunkArena)
        return self.arena

    def _empty_entries(self) -> ChunkArena:
        return ChunkArena(2 * self._num_chunks + 1 if self.for_training else self._num_chunks, np.int32)

    def _new_entries(self, keys: Int64s, starts: Int64s, now: int) -> Int64s:
        locations, num_absent = self.index.find(keys, starts)
        add_absent(self, keys, starts, locations, int(num_absent))
        fresh = np.zeros((len(keys), self.arena.width), dtype=np.int32)
        fresh[:, : self._num_chunks] = ABSENT
        if self.for_training:
            fresh[:, -1] = now
        self.arena.write(locations, fresh)
        self._version = self._version._replace(num_came=self._version.num_came + 1)
        return locations

    def _chunk_numbers(self, entries: Int64s) -> tuple[Chunks, Chunks]:
        """Chunk numbers of entries, and how many are there."""
        chunks = np.empty((len(entries), self._num_chunks), dtype=np.int32)
        held = np.empty(len(entries), dtype=np.int32)
        arena = self.arena
        read_chunk_numbers(arena.addresses, arena.shift, arena.width, entries, chunks, held)
        return chunks, held

    def _stored(self, gradients: npt.NDArray[Any], starts: Int64s) -> npt.NDArray[Any]:
        """The gradients of those columns that are stored; rows come table by table."""
        if not self.scattered:
            return np.ascontiguousarray(gradients)
        stored = np.empty((len(gradients), self.columns.shape[1]), dtype=gradients.dtype)
        stored_gradients(starts, self.columns, gradients, stored)
        return stored

    def _whole_rows(self, chunks: Chunks, held: Chunks, starts: Int64s) -> npt.NDArray[Any]:
        """Rows put together from their chunks; they come table by table."""
        rows, places = self._assembled(chunks, held, starts)
        return rows[places[1:]]

    def _assembled(
        self, chunks: Chunks, held: Chunks, starts: Int64s
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """The rows that hold something, behind one of zeros; and the place of each, as the kernel says."""
        arena = self.pool.arena
        rows = np.empty((np.count_nonzero(held) + 1, self.dim), dtype=self.dtype)
        places, zeros = np.empty(len(held) + 1, dtype=np.int32), np.zeros(arena.width, dtype=self.dtype)
        assemble_rows(
            arena.addresses, arena.shift, arena.width, chunks, held, zeros, self.pool.starts, starts,
            self.columns, self.scattered, places, rows,
        )  # fmt: skip
        return rows, places

    def _exchange(
        self, tables: Int64s, keys: Int64s, places: Int64s, numbers: Int64s, entries: Int64s | None = None
    ) -> Int64s:
        """Give chunks other numbers; returns those they had. Entries are found by key if not given."""
        if entries is None:
            entries = self.index.find_each(tables, keys)
        before = numbers.astype(np.int32)
        exchange_chunks(self.arena.addresses, self.arena.shift, self.arena.width, entries, places, before)
        return before.astype(np.int64)

    def _entry_blocks(self, table: int) -> Iterator[tuple[Int64s, Int64s]]:
        for keys, entries in self.index.blocks(table):
            for first in range(0, len(keys), _BLOCK_ROWS):
                some = slice(first, first + _BLOCK_ROWS)
                yield keys[some], entries[some]

    def _starts_of_one(self, table: int, count: int) -> Int64s:
        """Where each table's keys begin when all are of one table."""
        return np.where(np.arange(len(self.tables) + 1) > table, count, 0)
