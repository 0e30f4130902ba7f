"""`PrunedRows`: the row source of a collection whose rows are pruned, in this process.

Tables of one row size are pruned together, but features are spread over groups that threads work on side by
side. What concerns all tables, which rows are tracked and what is pruned, happens between these, in one
thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rowhaul.errors import ConfigError
from rowhaul.nn.early import EarlyLookups
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.nn.local_rows import summed, table_of_row
from rowhaul.nn.pooled import PooledRead, is_worth_threads
from rowhaul.nn.row_source import Arrays, Floats, Int64s, RowGradients, RowNote
from rowhaul.nn.threads import run_all
from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning import checkpoint
from rowhaul.pruning.deciding.located import Located
from rowhaul.pruning.narrowing import add_squares
from rowhaul.pruning.pool.pooling import pool_assembled, sum_gradients
from rowhaul.pruning.pool.tables import ChunkLookup, PrunedTables
from rowhaul.pruning.report import PruneReport, note_of, report_on
from rowhaul.pruning.settings import PruneSettings
from rowhaul.store import Lookup
from rowhaul.store.distinct import distinct_keys

FoundRows = tuple[Located, slice | Int64s, Int64s]
"""Entries of a group's rows, which ids of the batch they are, and the offsets of their bags."""


class PrunedGroup:
    """A group of features over pruned tables; ``first_table`` is the number of its first table there."""

    def __init__(self, features: FeatureGroup, tables: PrunedTables, first_table: int) -> None:
        self.features, self.tables = features, tables
        self.feature_tables = features.feature_tables + first_table
        self.column_tables = features.column_tables + first_table
        self.pending: list[tuple[ChunkLookup, Floats]] = []

    def locate(self, features: KeyedJaggedTensor) -> FoundRows:
        """Find the entries of the rows that a batch reads; also which of its ids they are, and their bags."""
        (values, starts, _), entries, offsets = self.features.ids_of(features)
        keys = distinct_keys(values, starts, self.feature_tables, len(self.tables.tables))
        return self.tables.map.locate(*keys), entries, offsets

    def read(self, found: FoundRows, *, counting: bool) -> ChunkRead:
        """Find the chunks of a batch."""
        located, entries, offsets = found
        return ChunkRead(self, self.tables.read(located, counting=counting), entries, offsets)

    def keep(self, lookup: Lookup, gradients: Floats) -> None:
        """Keep the gradients of rows for the step."""
        assert isinstance(lookup, ChunkLookup)
        self.pending.append((lookup, gradients))

    def step(self, lr: float, number: int) -> None:
        """Step the rows that have gradients."""
        if self.pending:
            pending, self.pending = self.pending, []
            lookup, gradients = pending[0] if len(pending) == 1 else self._summed(pending)
            self.tables.step(lookup, gradients, lr, number)

    def _summed(self, pending: Sequence[tuple[ChunkLookup, Floats]]) -> tuple[ChunkLookup, Floats]:
        """Sum several passes: each row once, with all its gradients and accesses."""
        rows, gradients = summed(pending, len(self.tables.tables))
        order = np.argsort(rows.locations)
        every = np.concatenate([lookup.locations for lookup, _ in pending])
        where = order[np.searchsorted(rows.locations, every, sorter=order)]
        counts = np.zeros(len(order), np.int64)
        np.add.at(counts, where, np.concatenate([lookup.counts for lookup, _ in pending]))
        slots = self.tables.map.entries.slots(rows.locations)
        parts = rows.keys, rows.starts, rows.inverse, rows.locations, rows.spare
        return ChunkLookup(*parts, counts, *slots), gradients


class ChunkRead(PooledRead):
    """One batch's use of a group whose chunks may be somewhere else after a pruning."""

    lookup: ChunkLookup

    def __init__(
        self, group: PrunedGroup, lookup: ChunkLookup, entries: slice | Int64s, offsets: Int64s
    ) -> None:
        super().__init__(group.features, group.tables.arena, lookup, entries, offsets, group.keep)
        self._tables, self._column_tables = group.tables, group.column_tables
        self._moves = group.tables.num_moves

    def pool(self, weights: Tensor | None, out: Floats) -> None:
        """Write this group's columns of ``out``."""
        group, (rows, places) = self.group, self._assembled()
        pool_assembled(
            rows, places, self.lookup.inverse, self.offsets, group.columns, group.is_mean,
            self.weights_of(weights), out, out.ctypes.data,
        )  # fmt: skip

    def keep_gradients(self, weights: Tensor | None, pooled_gradients: Floats) -> None:
        """Sum gradients per distinct row and keep them for the step."""
        self._check_unmoved()
        group, tables, lookup = self.group, self._column_tables, self.lookup
        gradients = np.empty((len(lookup.keys), group.dim), dtype=self._tables.dtype)
        sum_gradients(
            lookup.inverse, self.offsets, group.columns, tables, lookup.starts, group.is_mean,
            self.weights_of(weights), pooled_gradients, pooled_gradients.ctypes.data, gradients,
        )  # fmt: skip
        if self._tables.awaits_columns:
            add_squares(pooled_gradients, self.offsets, group.columns, tables, self._tables.squares)
        self.keep(lookup, gradients)

    def weight_gradients(self, pooled_gradients: Floats) -> Floats:
        """Return the gradient of each id's weight."""
        self._check_unmoved()
        # To the kernel of whole rows these are rows that are not stored; untracked ids read one of zeros.
        rows, places = self._assembled()
        inverse = places[self.lookup.inverse + 1].astype(np.int32)
        whole = Lookup(self.lookup.keys, self.lookup.starts, inverse, -1 - np.arange(len(rows)), rows)
        read = PooledRead(self.group, self.arena, whole, self.entries, self.offsets, self.keep)
        return read.weight_gradients(pooled_gradients)

    def _assembled(self) -> tuple[Floats, npt.NDArray[np.int32]]:
        return self._tables.assembled(self.lookup.slots, self.lookup.held, self.lookup.starts)

    def _check_unmoved(self) -> None:
        if self._moves != self._tables.num_moves:
            raise ConfigError(
                "rows were pruned, cleared or loaded between forward and backward; run forward again"
            )


class PrunedRows:
    """Pruned rows of a whole collection in this process.

    Args:
        features: the groups of features.
        optimizer: of rows.
        seed: of first values, and of pruning.
        settings: of pruning.
    """

    def __init__(
        self,
        features: Sequence[FeatureGroup],
        optimizer: RowOptimizerRule,
        seed: int,
        settings: PruneSettings,
    ) -> None:
        self.settings = settings
        self.tables: list[PrunedTables] = []  # by row size
        self.groups: list[PrunedGroup] = []
        self._early = EarlyLookups[list[FoundRows]]()
        self._is_announced = False  # whether the rows of the batch at hand are tracked and counted already
        self._noted_at = 0
        dtype = str(features[0].dtype).removeprefix("torch.")
        total = sum(spec.dim for group in features for spec in group.specs)
        for dim in dict.fromkeys(group.dim for group in features):
            members = [group for group in features if group.dim == dim]
            specs = [spec for group in members for spec in group.specs]
            for spec in specs:
                settings.check_dim(spec.name, dim)
            # Of a budget, tables get what their rows have of all columns.
            budget = settings.budget * dim * len(specs) // total
            tables = PrunedTables(specs, optimizer, dtype, seed, settings, budget=budget)
            self.tables.append(tables)
            first_table = 0
            for group in members:
                self.groups.append(PrunedGroup(group, tables, first_table))
                first_table += len(group.specs)

    def locate_early(self, features: KeyedJaggedTensor) -> None:
        """Find the entries of a batch that is read some time later, in any thread."""
        self._early[features] = [group.locate(features) for group in self.groups]

    def announce(self, features: KeyedJaggedTensor) -> None:
        """Track and count the rows of a batch that is then read in parts, before the next step."""
        self._is_announced = False
        self.read(features, training=True, on_unknown="init")
        self._is_announced = True

    def read(self, features: KeyedJaggedTensor, *, training: bool, on_unknown: str) -> list[ChunkRead]:
        """Find the rows of a batch; in training, track and count them. What is not there reads as zeros."""
        num_values = features.stride() * sum(
            one.features.dim * len(one.features.features) for one in self.groups
        )
        in_parallel = is_worth_threads(num_values)
        found = self._early.pop(features, None)
        if found is None:
            found = run_all([partial(group.locate, features) for group in self.groups], in_parallel)
        else:
            for group, one in zip(self.groups, found, strict=True):
                group.tables.map.refresh(one[0])
        is_new = training and not self._is_announced
        if is_new:
            self._add_new(found)
        pairs = zip(self.groups, found, strict=True)
        return run_all([partial(group.read, one, counting=is_new) for group, one in pairs], in_parallel)

    def _add_new(self, found: Sequence[FoundRows]) -> None:
        for tables in self.tables:
            if not tables.has_state:
                raise ConfigError(
                    "this collection only serves: its utilities and optimizer state were dropped; load it "
                    "again to train it, or call eval()"
                )
            pairs = zip(self.groups, found, strict=True)
            tables.add_new([one[0] for group, one in pairs if group.tables is tables])

    def step(self, lr: float, number: int) -> None:
        """Step every row that has gradients, then prune if it is time."""
        num_values = sum(gradients.size for group in self.groups for _, gradients in group.pending)
        run_all([partial(group.step, lr, number) for group in self.groups], is_worth_threads(num_values))
        self._is_announced = False
        for tables in self.tables:
            tables.finish_step(number)

    def gradients(self) -> list[RowGradients]:
        """Return the gradients that await a step, pass by pass."""
        return [
            RowGradients(lookup.keys, gradients, partial(table_of_row, group.tables.tables, lookup))
            for group in self.groups
            for lookup, gradients in group.pending
        ]

    def drop_gradients(self) -> None:
        """Drop gradients that no step has used."""
        for group in self.groups:
            group.pending.clear()

    def num_rows(self, table: str) -> int:
        """Count the rows of a table that are tracked."""
        tables, position = self.find_table(table)
        return int(tables.map.index.num_keys[position])

    def rows(self, table: str) -> Iterator[tuple[Int64s, Floats]]:
        """Yield all rows of a table as blocks of (keys, values), zeros where pruned."""
        tables, position = self.find_table(table)
        return tables.blocks(position)

    def load_rows(self, table: str, keys: Int64s, records: Floats) -> None:
        """Refuse: pruned rows come with their utilities."""
        raise ConfigError(f"table {table!r} is pruned: its rows come from a checkpoint or a state_dict")

    def state_names(self) -> list[str]:
        """Name the arrays of `state`."""
        return checkpoint.names_of_state(self)

    def state(self) -> Arrays:
        """Return everything as named arrays."""
        return checkpoint.state_of(self)

    def load_state(self, arrays: Arrays) -> None:
        """Replace everything by what `state` returned."""
        self.drop_gradients()
        checkpoint.load_state(self, arrays)

    def notes(self) -> list[RowNote]:
        """Report the latest pruning, once."""
        if self.pruned_at == self._noted_at:
            return []
        self._noted_at = self.pruned_at
        return [note_of(self.report())]

    def report(self) -> PruneReport:
        """Describe which tables hold how much."""
        return report_on(self.tables)

    def clear(self) -> None:
        """Drop every row and every gradient."""
        self.drop_gradients()
        self._is_announced = False
        for tables in self.tables:
            tables.clear()

    @property
    def pruned_at(self) -> int:
        """The step of the latest pruning; 0: there was none."""
        return max(tables.map.pruned_at for tables in self.tables)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of chunks, used or not, entries and index."""
        return sum(tables.allocated_bytes for tables in self.tables)

    def serve(self) -> None:
        """Drop utilities and optimizer state: rows can then be read and no longer trained."""
        for tables in self.tables:
            tables.serve()

    def find_table(self, name: str) -> tuple[PrunedTables, int]:
        """The tables that a table is among, and its position there."""
        for tables in self.tables:
            for position, spec in enumerate(tables.tables):
                if spec.name == name:
                    return tables, position
        raise ConfigError(f"no table {name!r}; the tables are {', '.join(self.table_names())}")

    def table_names(self) -> list[str]:
        """Name all tables."""
        return [spec.name for tables in self.tables for spec in tables.tables]
