"""The tables of a pruned model as a cluster has them: every table becomes tables of chunks.

Chunk ``k`` of a row of table ``t`` is a row of *chunk table* ``t * num_chunks + k`` under the same key:
found, moved, cached and stepped like any row. It begins with the values that the whole row would have there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul._quantities import parse_bytes
from rowhaul.errors import ConfigError
from rowhaul.nn.features import FeatureGroup
from rowhaul.optim import SGD, RecordMemory, RowOptimizerRule
from rowhaul.pruning.chunk_kernels import write_initial_chunks
from rowhaul.pruning.config import check_cluster
from rowhaul.pruning.deciding.chunk_map import ChunkMap, row_seeds
from rowhaul.pruning.deciding.room import LEAST_ENTRIES, RowCut, Sizes, chunk_starts, part_sizes
from rowhaul.pruning.settings import PruneSettings
from rowhaul.runtime.layout import CopiedRows, TableLayout, Upkeep
from rowhaul.runtime.lookups import Rows
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.runtime.worker_rows import CachedRows
from rowhaul.schedule import HotRows, IdBatch, RowPolicy, Scheduler, ScheduleSettings, Topology
from rowhaul.store import TableGroup, TableSpec

Ints = npt.NDArray[np.int64]


class ChunkTables(TableGroup):
    """Chunk tables of one chunk size.

    Args:
        tables: of chunks.
        optimizer: of rows; to it a chunk is a row.
        dtype: of values and state.
        seed: as of whole rows.
        row_tables: the table of whole rows that each belongs to.
        columns: of a row that each one's chunks have.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: RowOptimizerRule,
        dtype: npt.DTypeLike,
        seed: int,
        row_tables: Sequence[str],
        columns: Ints,  # tables x values of a chunk
    ) -> None:
        super().__init__(tables, optimizer, dtype, seed)
        self._seeds = row_seeds(row_tables, seed)
        self._columns = np.ascontiguousarray(columns)

    def _write_initial(
        self, memory: RecordMemory, records: Ints, keys: Ints, starts: Ints, which: Ints
    ) -> None:
        state = np.array([self.optimizer.initial_state], dtype=self.dtype)
        tables = np.searchsorted(starts, which, side="right") - 1
        write_initial_chunks(
            memory.addresses, memory.shift, memory.width, records, tables, keys[which], np.zeros_like(which),
            np.array([0, self.dim]), self._columns, self._seeds, self._lows, self._steps,
            np.array([self.optimizer.state_width(self.dim)]), state,
        )  # fmt: skip


@dataclass(frozen=True)
class ChunkLayout(TableLayout):
    """What every rank knows of pruned tables; ``specs`` are those of chunks, in the order of plans."""

    row_format: ClassVar[str] = "chunked"

    rows: tuple[TableSpec, ...]  # tables of whole rows
    pruning: PruneSettings
    columns: tuple[tuple[int, ...], ...] = ()  # that each table keeps; none: all

    @property
    def num_chunks(self) -> int:
        """Chunks of a row."""
        return self.pruning.chunks

    @property
    def cut(self) -> RowCut:
        """How rows are cut into chunks."""
        return RowCut(self.column_matrix.shape[1], self.num_chunks, self.optimizer)

    @property
    def column_matrix(self) -> Ints:
        """Tables x values that a row has: which columns they are."""
        if self.columns:
            return np.array(self.columns, np.int64)
        return np.tile(np.arange(self.rows[0].dim), (len(self.rows), 1))

    @property
    def awaits_columns(self) -> bool:
        """Whether it is still to be decided which columns are kept."""
        return bool(self.columns_to_keep) and not self.columns

    @property
    def columns_to_keep(self) -> int:
        """Columns that tables have after the cold start; 0: all."""
        return self.pruning.num_columns(self.rows[0].dim)

    def narrowed(self, columns: Ints) -> ChunkLayout:
        """The same tables with fewer columns, tables x those that are kept."""
        specs = _chunk_specs(self.rows, columns.shape[1], self.num_chunks)
        return replace(self, specs=specs, columns=tuple(tuple(some) for some in columns.tolist()))

    @property
    def part_sizes(self) -> Sizes:
        """Bytes of the parts of a row."""
        num_values, dim = self.column_matrix.shape[1], self.rows[0].dim
        return part_sizes(num_values, dim, self.pruning, self.optimizer, self.dtype)

    def make_map(self, least_entries: int = LEAST_ENTRIES) -> ChunkMap:
        """An empty map of the chunks of these tables."""
        names = [spec.name for spec in self.rows]
        return ChunkMap(names, self.pruning, self.part_sizes, self.seed, least_entries=least_entries)

    def settled(self) -> ChunkLayout:
        """The tables with as many columns as they will keep; which ones needs gradients to say."""
        if not self.awaits_columns:
            return self
        return self.narrowed(np.tile(np.arange(self.columns_to_keep), (len(self.rows), 1)))

    def groups(self) -> list[TableGroup]:
        """Empty tables of chunks, those of one size together."""
        matrix, starts, found = self.column_matrix, self.cut.starts, list[TableGroup]()
        for dim in dict.fromkeys(spec.dim for spec in self.specs):
            some = [number for number, spec in enumerate(self.specs) if spec.dim == dim]
            tables, places = np.divmod(some, self.num_chunks)
            columns = matrix[tables[:, None], starts[places][:, None] + np.arange(dim)]
            specs, names = [self.specs[one] for one in some], [self.rows[table].name for table in tables]
            found.append(ChunkTables(specs, self.optimizer, self.dtype, self.seed, names, columns))
        return found

    def schedule_settings(
        self,
        config: Any,
        topology: Topology,
        *,
        seed: int = 0,
        hot: HotRows | None = None,
        speeds: Sequence[float] | None = None,
        policies: tuple[RowPolicy, ...] = (),
        may_stay_home: bool = False,
    ) -> ScheduleSettings:
        """Settings of the scheduler for chunks: a cache given in rows holds as many times their chunks."""
        check_cluster(config.sync, config.hot_rows)
        _check_policies(policies)
        in_bytes = str(config.cache).strip()[-1:].isalpha()
        if not in_bytes:
            config = replace(config, cache=str(int(config.cache) * self.num_chunks))
        chunked = replace(topology, tables_per_row=self.num_chunks)
        settings: ScheduleSettings = config.schedule(chunked, self.sizes(), seed=seed, speeds=speeds)
        if in_bytes and self.columns_to_keep:  # chunks of one size now will be smaller: more of them fit
            capacity = parse_bytes(str(config.cache), "cluster.cache")
            settings = replace(settings, cache=replace(settings.cache, capacity=capacity, unit="bytes"))
        return settings

    def make_scheduler(self, settings: ScheduleSettings, ids: Iterable[IdBatch]) -> Scheduler:
        """Make a scheduler of chunks over the ids of rows."""
        from rowhaul.pruning.scheduling import ChunkScheduler

        return ChunkScheduler(settings, self, ids)

    def records_read(self, batches: list[IdBatch]) -> list[IdBatch]:
        """Return the chunks that batches read once rows are pruned by how often these batches read them."""
        from rowhaul.pruning.scheduling import chunks_read

        return chunks_read(self, batches)

    def make_cache(self, groups: Sequence[FeatureGroup]) -> RowMemory:
        """Make a worker's cache of chunks."""
        return RowMemory(self, makes_rows=False)

    def make_upkeep(self, *, trains: bool) -> Upkeep:
        """Make what prunes rows between segments."""
        from rowhaul.pruning.cluster.pruning import ClusterPruning

        return ClusterPruning(self, trains=trains)

    def cached_rows(
        self, groups: Sequence[FeatureGroup], cache: RowMemory, rates: Rates, upkeep: Upkeep, *, bounded: bool
    ) -> CachedRows:
        """Make the row source of a worker."""
        from rowhaul.pruning.cluster.pruning import ClusterPruning
        from rowhaul.pruning.cluster.worker import ChunkedWorkerRows

        assert isinstance(upkeep, ClusterPruning)
        return ChunkedWorkerRows(groups, cache, rates, upkeep)

    def copied_rows(self, groups: Sequence[FeatureGroup]) -> CopiedRows:
        """Make a row source for rows that are only read."""
        from rowhaul.pruning.cluster.worker import AssembledRows

        chunks = [TableGroup(one.tables, SGD(lr=0.0), one.dtype, self.seed) for one in self.groups()]
        memory = RowMemory(self, chunks, makes_rows=False)
        return _CopiedChunks(memory, AssembledRows(groups, memory))


class _CopiedChunks(CopiedRows):
    """Copies of chunks."""

    def records_of(self, rows: Rows) -> Rows:
        """Name all chunks that rows may have."""
        layout = self.memory.layout
        assert isinstance(layout, ChunkLayout)
        places = np.tile(np.arange(layout.num_chunks), len(rows))
        tables = np.repeat(rows.tables * layout.num_chunks, layout.num_chunks) + places
        return Rows(tables, np.repeat(rows.keys, layout.num_chunks))


def fresh_records(memory: RowMemory, number: int, keys: Ints) -> npt.NDArray[Any]:
    """Make rows of a chunk table as they begin."""
    group, position = memory.place_of(number)
    tables = memory.groups[group]
    return tables.arena.read(tables.make_fresh(np.full(len(keys), position), keys))


def chunk_layout(whole: TableLayout, pruning: PruneSettings) -> ChunkLayout:
    """The tables of chunks for tables of whole rows."""
    if len({spec.dim for spec in whole.specs}) > 1:
        dims = sorted({spec.dim for spec in whole.specs})
        raise ConfigError(
            f"the tables have rows of {', '.join(map(str, dims))} values; on a cluster, pruning needs rows "
            "of one size so far: give all tables one embedding_dim, or prune in one process"
        )
    for spec in whole.specs:
        pruning.check_dim(spec.name, spec.dim)
    specs = _chunk_specs(whole.specs, whole.specs[0].dim, pruning.chunks)
    return ChunkLayout(specs, whole.optimizer, whole.dtype, whole.seed, whole.specs, pruning)


def _chunk_specs(rows: tuple[TableSpec, ...], num_values: int, num_chunks: int) -> tuple[TableSpec, ...]:
    sizes = np.diff(chunk_starts(num_values, num_chunks)).tolist()
    return tuple(
        TableSpec(f"{spec.name}#{place}", size, spec.initial_low, spec.initial_high)
        for spec in rows
        for place, size in enumerate(sizes)
    )


def _check_policies(policies: Sequence[RowPolicy]) -> None:
    if not all(policy.keeps_all for policy in policies):
        raise ConfigError(
            "prune decides by itself which rows are dropped, but tables have policies that admit and drop "
            "rows; leave out one of them"
        )


def check_schedule(settings: ScheduleSettings, layout: ChunkLayout) -> None:
    """Refuse what pruning does not go together with, and sizes of whole rows."""
    hot = None if settings.hot is None else f"{len(settings.hot.keys):,}"
    check_cluster(settings.sync_mode.name, hot)
    _check_policies(settings.row_policies)
    if settings.sizes != layout.sizes() or settings.topology.tables_per_row != layout.num_chunks:
        raise ConfigError(
            f"the schedule's settings are of whole rows, but rows are pruned in {layout.num_chunks} chunks: "
            "take sizes of layout_of(collection).sizes(), and a topology with tables_per_row of as many"
        )
