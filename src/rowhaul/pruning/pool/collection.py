"""How a collection reads and trains rows that are pruned: the same steps, with a pruner in between.

Tables of one row size share a pool, but are spread over groups that threads work on side by side. What
concerns them all, who gets memory, happens between their steps, in one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rowhaul.errors import ConfigError
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.nn.local_rows import summed
from rowhaul.nn.pooled import PooledRead, is_worth_threads
from rowhaul.nn.row_source import Arrays, RowNote
from rowhaul.nn.threads import run_all
from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning.pool import ChunkPool, PrunedLookup, PrunedTables, Pruner, PruneSettings
from rowhaul.pruning.pool.early import EarlyLookups, FoundRows
from rowhaul.pruning.pool.state import load_state, names_of_state, state_of
from rowhaul.pruning.report import PruneReport, report_on
from rowhaul.store import Lookup

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]


class PrunedGroup:
    """A group of features over pruned tables."""

    pruner: Pruner

    def __init__(
        self, features: FeatureGroup, optimizer: RowOptimizerRule, seed: int, pool: ChunkPool
    ) -> None:
        self.features = features
        dtype = str(features.dtype).removeprefix("torch.")
        self.pruned = PrunedTables(features.specs, optimizer, dtype, seed, pool)
        self.pending: list[tuple[Lookup, Floats]] = []

    def locate(self, features: KeyedJaggedTensor) -> FoundRows:
        """Find the entries of the rows that a batch reads; and which of its ids they are, in which bags."""
        ids, entries, offsets = self.features.ids_of(features)
        return self.pruned.locate(*ids), entries, offsets

    def step(self, lr: float, number: int) -> None:
        """One optimizer step on the chunks that are there; utilities of all of them."""
        if not self.pending:
            return
        counts: Int64s | None = None
        lookup, gradients = self.pending[0]
        if len(self.pending) > 1:
            lookup, gradients, counts = self._joined()
        self.pending.clear()
        assert isinstance(lookup, PrunedLookup)
        self.pruned.step(lookup, gradients, lr, number)
        self.pruner.learn(self.pruned, lookup, counts, gradients, number)

    def _joined(self) -> tuple[Lookup, Floats, Int64s]:
        """Several passes as one: each row once, with its gradients and its accesses summed."""
        together, gradients = summed(self.pending, self.pruned)
        located = self.pruned.locate_keys(together.keys, together.starts, together.inverse)
        counts = np.zeros(len(together.keys), dtype=np.int64)
        for lookup, _ in self.pending:
            for table in range(len(self.pruned.tables)):
                first, end = together.starts[table : table + 2]
                some = slice(lookup.starts[table], lookup.starts[table + 1])
                places = first + np.searchsorted(together.keys[first:end], lookup.keys[some])
                assert isinstance(lookup, PrunedLookup)
                counts[places] += lookup.counts[some]
        return self.pruned.read(located), gradients, counts


class PrunedRead(PooledRead):
    """One batch's use of a group whose chunks may be somewhere else after a pruning."""

    def __init__(
        self, pruned_group: PrunedGroup, lookup: PrunedLookup, entries: slice | Int64s, offsets: Int64s
    ) -> None:
        pruned = pruned_group.pruned
        keep = partial(_append, pruned_group.pending)
        super().__init__(pruned_group.features, pruned.arena, lookup, entries, offsets, keep)
        self._pruner, self._moves = pruned_group.pruner, pruned_group.pruner.num_moves
        self._pruned, self._chunks = pruned, lookup

    def pool(self, weights: Tensor | None, out: Floats) -> None:
        """Write this group's columns of ``out``."""
        group = self.group
        self._pruned.pool_vectors(
            self._chunks, self.offsets, group.columns, group.is_mean, self.weights_of(weights), out
        )  # fmt: skip

    def keep_gradients(self, weights: Tensor | None, pooled_gradients: Floats) -> None:
        """Sum gradients per distinct row and keep them for the step."""
        self._check_unmoved()
        group = self.group
        gradients = self._pruned.sum_gradients(
            self._chunks, group.feature_tables, self.offsets, group.columns, group.is_mean,
            self.weights_of(weights), pooled_gradients,
        )  # fmt: skip
        self._keep(self._chunks, gradients)

    def weight_gradients(self, pooled_gradients: Floats) -> Floats:
        """Gradient of each id's weight."""
        self._check_unmoved()
        rows = self._pruned.rows(self._chunks)
        # The kernel of unpruned rows, to which these are rows that are not stored; ids without an entry read
        # one more, of zeros.
        rows = np.concatenate([rows, np.zeros((1, rows.shape[1]), rows.dtype)])
        inverse = np.where(self._chunks.inverse < 0, np.int32(len(rows) - 1), self._chunks.inverse)
        self.lookup = replace(self._chunks, inverse=inverse, locations=-1 - np.arange(len(rows)), spare=rows)
        return super().weight_gradients(pooled_gradients)

    def _check_unmoved(self) -> None:
        if self._moves != self._pruner.num_moves:
            raise ConfigError(
                "rows were pruned, cleared or loaded between forward and backward; run forward again"
            )


def _append(pending: list[tuple[Lookup, Floats]], lookup: Lookup, gradients: Floats) -> None:
    pending.append((lookup, gradients))


@dataclass
class PrunedRows:
    """Pruned rows of a whole collection in this process: one pruner for each row size."""

    settings: PruneSettings
    pruners: list[Pruner]
    groups: list[PrunedGroup]
    early: EarlyLookups = field(default_factory=EarlyLookups)
    noted_at: int = 0

    def locate_early(self, features: KeyedJaggedTensor) -> None:
        """Find the entries of a batch that is read some time later, in any thread."""
        self.early.put(features, [group.locate(features) for group in self.groups])

    def read(self, features: KeyedJaggedTensor, *, training: bool, on_unknown: str) -> list[PooledRead]:
        """Find or make the rows of a batch, and copy them; what is not there reads as zeros."""
        num_values = features.stride() * sum(
            one.features.dim * len(one.features.features) for one in self.groups
        )
        in_parallel = is_worth_threads(num_values)
        found = self.early.take(features)
        if found is None:
            found = run_all([partial(group.locate, features) for group in self.groups], in_parallel)
        else:
            for group, one in zip(self.groups, found, strict=True):
                group.pruned.refresh(one[0])
        located = {id(group): one[0] for group, one in zip(self.groups, found, strict=True)}
        if training:
            for pruner in self.pruners:
                if not pruner.pool.has_state:
                    raise ConfigError(
                        "this collection only serves: its utilities and optimizer state were dropped; load "
                        "it again to train it, or call eval()"
                    )
                of_pruner = [group for group in self.groups if group.pruner is pruner]
                pruner.add_new([located[id(group)] for group in of_pruner])
        lookups = run_all(
            [partial(group.pruned.read, located[id(group)]) for group in self.groups], in_parallel
        )
        return [
            PrunedRead(group, lookup, *one[1:])
            for group, lookup, one in zip(self.groups, lookups, found, strict=True)
        ]

    def step(self, lr: float, number: int) -> None:
        """Step every row that has gradients, then prune if it is time."""
        num_values = sum(gradients.size for group in self.groups for _, gradients in group.pending)
        tasks = [partial(group.step, lr, number) for group in self.groups]
        run_all(tasks, is_worth_threads(num_values))
        for pruner in self.pruners:
            pruner.finish_step(number)

    def drop_gradients(self) -> None:
        """Drop gradients that no step has used."""
        for group in self.groups:
            group.pending.clear()

    def num_rows(self, table: str) -> int:
        """Count the rows of a table that have an entry."""
        tables, position = find_table(self, table)
        return int(tables.index.num_keys[position])

    def rows(self, table: str) -> Iterator[tuple[Int64s, Floats]]:
        """Yield all rows of a table as blocks of (keys, values), zeros where pruned."""
        tables, position = find_table(self, table)
        return tables.blocks(position)

    def load_rows(self, table: str, keys: Int64s, records: Floats) -> None:
        """Refuse: pruned rows come with what pruners know of them."""
        raise ConfigError(f"table {table!r} is pruned: its rows come from a checkpoint or a state_dict")

    def state_names(self) -> list[str]:
        """Name the arrays of `state`."""
        return names_of_state(self, self._tables())

    def state(self) -> Arrays:
        """Return everything as named arrays."""
        return state_of(self, self._tables())

    def load_state(self, arrays: Arrays) -> None:
        """Replace everything by what `state` returned."""
        self.drop_gradients()
        load_state(self, self._tables(), arrays)

    def notes(self) -> list[RowNote]:
        """Report the latest pruning, once."""
        if self.pruned_at == self.noted_at:
            return []
        self.noted_at = self.pruned_at
        return [note_of(self.report())]

    def _tables(self) -> list[str]:
        return [spec.name for group in self.groups for spec in group.features.specs]

    def report(self) -> PruneReport:
        """Which tables hold how much, and what was pruned last."""
        return report_on(self.pruners)

    def wait(self) -> None:
        """Come back when utilities are up to date."""
        for pruner in self.pruners:
            pruner.background.wait()

    def clear(self) -> None:
        """Drop every row and every gradient."""
        self.drop_gradients()
        for pruner in self.pruners:
            pruner.reset()

    @property
    def pruned_at(self) -> int:
        """The step of the latest pruning; 0: there was none."""
        return max(pruner.pruned_at for pruner in self.pruners)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of chunks, used or not, entries and index."""
        pools = sum(pruner.pool.arena.allocated_bytes for pruner in self.pruners)
        return pools + sum(group.pruned.allocated_bytes for group in self.groups)

    def serve(self) -> None:
        """Drop utilities and optimizer state: rows can then be read and no longer trained."""
        for pruner in self.pruners:
            pruner.serve()


def make_pruned_rows(
    features: Sequence[FeatureGroup], optimizer: RowOptimizerRule, seed: int, settings: PruneSettings
) -> PrunedRows:
    """Make empty pruned tables for groups of features."""
    specs = [spec for group in features for spec in group.specs]
    for spec in specs:
        settings.check_dim(spec.name, spec.dim)
    dtype = str(features[0].dtype).removeprefix("torch.")
    total = sum(spec.dim for spec in specs)
    pruners: list[Pruner] = []
    groups: list[PrunedGroup] = []
    for dim in dict.fromkeys(group.dim for group in features):
        pool = ChunkPool(dim, settings.chunks, optimizer, dtype)
        members = [PrunedGroup(group, optimizer, seed, pool) for group in features if group.dim == dim]
        of_dim = sum(spec.dim for spec in specs if spec.dim == dim)
        # Of a budget, tables get what their rows have of all columns.
        budget = settings.budget * of_dim // total
        pruner = Pruner(pool, [group.pruned for group in members], settings, budget, seed)
        for group in members:
            group.pruner = pruner
        pruners.append(pruner)
        groups += members
    return PrunedRows(settings, pruners, groups)


def find_table(rows: PrunedRows, table: str) -> tuple[PrunedTables, int]:
    """The tables that a table is among, and its position there."""
    for group in rows.groups:
        for position, spec in enumerate(group.pruned.tables):
            if spec.name == table:
                return group.pruned, position
    known = ", ".join(rows._tables())
    raise ConfigError(f"no table {table!r}; the tables are {known}")


def note_of(report: PruneReport) -> RowNote:
    """What a pruning has left, for a log."""
    values = {
        "rows": float(report.num_rows),
        "ratio": report.ratio,
        "chunks": float(report.num_chunks),
        "bytes": float(report.allocated_bytes),
        **{f"dims/{table.name}": table.mean_dims for table in report.tables},
    }
    text = f"pruned: {report.num_chunks:,} of {report.most_chunks:,} chunks are held"
    return RowNote("prune", text, values, {"rows_by_chunks": report.rows_by_chunks})
