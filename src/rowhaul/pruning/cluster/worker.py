"""A worker's pruned rows: put together from chunks to be read, their gradients taken apart again.

The model reads whole rows, zeros where a chunk is not there. Of their gradients, those of chunks that are
there go the way of all rows. Where utilities are of gradients, the norms of all of them are logged for the
next pruning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rowhaul.errors import ConfigError
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.nn.local_rows import TableRows, tables_of_keys
from rowhaul.nn.pooled import PooledRead
from rowhaul.pruning.chunk_kernels import put_chunks, stored_gradients, take_chunks
from rowhaul.pruning.cluster.pruning import ClusterPruning
from rowhaul.pruning.deciding.entry_kernels import chunk_norms
from rowhaul.pruning.layout import ChunkLayout
from rowhaul.pruning.narrowing import add_squares
from rowhaul.runtime.batch_rows import BatchRows
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.runtime.worker_rows import CachedRows, TakenGradients
from rowhaul.schedule.directory.row_index import RowIndex
from rowhaul.schedule.plan import LiveRows, Plan
from rowhaul.store import Lookup, TableGroup

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]


class ChunkReader:
    """Puts whole rows of features together from the chunks in a memory."""

    def __init__(self, groups: Sequence[FeatureGroup], memory: RowMemory) -> None:
        layout = memory.layout
        assert isinstance(layout, ChunkLayout)
        self._memory, self._num_chunks, self._starts = memory, layout.num_chunks, layout.cut.starts
        self._columns = layout.column_matrix
        numbers = {spec.name: number for number, spec in enumerate(layout.rows)}
        # By group of features: the number of each of its tables.
        self.tables = [np.array([numbers[one.name] for one in group.specs]) for group in groups]

    def look_up(self, number: int, whole: TableGroup, ids: tuple[Ints, Ints, Ints]) -> Lookup:
        """Return a batch's rows of a group, none of them stored whole; zeros where pruned."""
        keys, starts, inverse = whole.distinct(*ids)
        rows = np.zeros((len(keys), whole.dim), whole.dtype)
        tables = np.repeat(self.tables[number], np.diff(starts))
        group_of, position_of = self._memory.places
        for place in range(self._num_chunks):
            # The group is the same for all tables, whose rows are of one size.
            chunks = self._memory.groups[int(group_of[place])]
            found = chunks.index.find_each(position_of[tables * self._num_chunks + place], keys)
            arena, first = chunks.arena, self._starts[place]
            put_chunks(
                arena.addresses, arena.shift, arena.width, found, tables, self._columns, first, chunks.dim,
                rows,
            )  # fmt: skip
        return Lookup(keys, starts, inverse, -1 - np.arange(len(keys)), rows)


class AssembledRows(TableRows):
    """A row source that puts rows together from chunks, and only reads."""

    def __init__(self, groups: Sequence[FeatureGroup], memory: RowMemory) -> None:
        super().__init__(groups, whole_tables(groups, memory))
        self._reader = ChunkReader(groups, memory)

    def look_up(self, number: int, ids: tuple[Ints, Ints, Ints], training: bool, on_unknown: str) -> Lookup:
        """Put a group's rows together."""
        return self._reader.look_up(number, self.tables[number], ids)


def whole_tables(groups: Sequence[FeatureGroup], memory: RowMemory) -> list[TableGroup]:
    """Make tables of whole rows, which stay empty: their rows are put together from chunks."""
    return [group.make_tables(memory.layout.optimizer, memory.layout.seed) for group in groups]


class _Read(NamedTuple):
    """Distinct rows that a batch has read, and their gradients."""

    tables: Ints
    keys: Ints
    gradients: Floats


class ChunkedWorkerRows(CachedRows):
    """The row source of a worker whose cache holds chunks.

    Args:
        groups: the features.
        cache: of chunks.
        rates: of learning.
        pruning: gets what this worker measures.
    """

    def __init__(
        self, groups: Sequence[FeatureGroup], cache: RowMemory, rates: Rates, pruning: ClusterPruning
    ) -> None:
        super().__init__(groups, cache, rates, tables=whole_tables(groups, cache))
        layout = cache.layout
        assert isinstance(layout, ChunkLayout)
        self._pruning, self._starts, self._columns = pruning, layout.cut.starts, layout.column_matrix
        self._reader = ChunkReader(groups, cache)
        self._table_and_place: list[tuple[Ints, Ints]] = []  # by group of chunks: of each of its tables
        for number in range(len(cache.groups)):
            some = np.flatnonzero(cache.places[0] == number)
            some = some[np.argsort(cache.places[1][some])]
            self._table_and_place.append((some // layout.num_chunks, some % layout.num_chunks))
        self._live: LiveRows | None = None

    def expect(self, plan: Plan, rows: Sequence[BatchRows]) -> None:
        """Prepare for the batch of a plan; it reads rows, while the plan's are chunks."""
        self._live = plan.live

    def read(self, features: KeyedJaggedTensor, *, training: bool, on_unknown: str) -> list[PooledRead]:
        """Find the rows of a batch; while columns are chosen, measure the gradients of its vectors."""
        reads = super().read(features, training=training, on_unknown=on_unknown)
        if self._pruning.layout.awaits_columns:
            tables = self._reader.tables
            reads = [
                _MeasuredRead(one, tables[number][one.group.column_tables], self._pruning.squares)
                for number, one in enumerate(reads)
            ]
        return reads

    def look_up(self, number: int, ids: tuple[Ints, Ints, Ints], training: bool, on_unknown: str) -> Lookup:
        """Put a group's rows together."""
        return self._reader.look_up(number, self.tables[number], ids)

    def take(self, iteration: int, rows: Sequence[BatchRows]) -> TakenGradients:
        """Remove everything that backward left, as gradients of chunks."""
        read = []
        for number, tables in enumerate(self._reader.tables):
            taken = self.take_gradients(number)
            if taken is not None:
                read.append(_Read(tables[tables_of_keys(taken[0])], taken[0].keys, taken[1]))
        for one in read:
            self._log_norms(iteration + 1, one)
        return TakenGradients(iteration, [(part, self._of_chunks(part, read)) for part in rows])

    def _log_norms(self, now: int, read: _Read) -> None:
        """Log the norms of gradients, times the accesses of all workers, where they are utilities."""
        log, live = self._pruning.utility_log, self._live
        if log is None:
            return
        assert live is not None
        places = _index_of(live.tables, live.keys).find(read.tables.astype(np.int32), read.keys)
        tracked = np.flatnonzero(places >= 0)
        places = places[tracked]
        stored = stored_gradients(read.tables, self._columns, read.gradients)
        norms = chunk_norms(stored, self._starts)[tracked]
        amounts = live.accesses[places].astype(np.float64)[:, None] * norms
        log.add(live.numbers[places], amounts, now)

    def _of_chunks(self, part: BatchRows, read: list[_Read]) -> Floats:
        """The gradients of chunks that are there."""
        chunks = self._cache.groups[part.number]
        out = np.empty((len(part), chunks.dim), chunks.dtype)
        tables_of, places_of = self._table_and_place[part.number]
        tables, places = tables_of[part.rows.tables], places_of[part.rows.tables]
        num_found = 0
        for one in read:
            rows = _index_of(one.tables, one.keys).find(tables.astype(np.int32), part.rows.keys)
            num_found += int(np.count_nonzero(rows >= 0))
            take_chunks(one.gradients, rows, tables, places, self._starts, self._columns, out)
        if num_found < len(part):
            raise ConfigError(
                f"{len(part) - num_found:,} rows of this worker have no gradient; call backward() on the "
                "loss of the batch that was dispatched, and on nothing else, then step()"
            )
        return out


def _index_of(tables: npt.NDArray[Any], keys: Ints) -> RowIndex:
    """Index distinct rows by their position."""
    index = RowIndex()
    index.reserve(len(keys))
    index.add(tables.astype(np.int32), keys, np.arange(len(keys)))
    return index


class _MeasuredRead(PooledRead):
    """A read that adds the squared gradients of its vectors to the sums of their tables."""

    def __init__(self, read: PooledRead, column_tables: Ints, squares: npt.NDArray[np.float64]) -> None:
        super().__init__(read.group, read.arena, read.lookup, read.entries, read.offsets, read.keep)
        self._column_tables, self._squares = column_tables, squares

    def keep_gradients(self, weights: Tensor | None, pooled_gradients: Floats) -> None:
        """Measure gradients, and keep them for the step."""
        add_squares(pooled_gradients, self.offsets, self.group.columns, self._column_tables, self._squares)
        super().keep_gradients(weights, pooled_gradients)
