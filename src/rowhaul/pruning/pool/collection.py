"""How a collection reads and trains rows that are pruned: the same steps, with a pruner in between.

Tables of one row size share a pool, but are spread over groups that threads work on side by side. What
concerns them all, who gets memory, happens between their steps, in one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rowhaul.errors import ConfigError
from rowhaul.nn.config import EmbeddingBagConfig
from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.nn.pooled import FeatureGroup, PooledRead, summed
from rowhaul.nn.threads import run_all
from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning.pool import ChunkPool, PrunedLookup, PrunedTables, Pruner, PruneSettings
from rowhaul.pruning.pool.early import EarlyLookups, FoundRows
from rowhaul.pruning.report import PruneReport, report_on
from rowhaul.store import Lookup

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]


class PrunedGroup(FeatureGroup):
    """A group of features over pruned tables."""

    pruner: Pruner

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        first_columns: Sequence[int],
        optimizer: RowOptimizerRule,
        seed: int,
        pool: ChunkPool,
    ) -> None:
        super().__init__(configs, first_columns, optimizer, seed, partial(PrunedTables, pool=pool))

    @property
    def pruned(self) -> PrunedTables:
        """The tables."""
        assert isinstance(self.tables, PrunedTables)
        return self.tables

    def locate(self, features: KeyedJaggedTensor) -> FoundRows:
        """Find the entries of the rows that a batch reads; and which of its ids they are, in which bags."""
        ids, entries, offsets = self.ids_of(features)
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
        together, gradients = summed(self.pending, self.tables)
        located = self.pruned.locate_keys(together.keys, together.starts, together.inverse)
        counts = np.zeros(len(together.keys), dtype=np.int64)
        for lookup, _ in self.pending:
            for table in range(len(self.tables.tables)):
                first, end = together.starts[table : table + 2]
                some = slice(lookup.starts[table], lookup.starts[table + 1])
                places = first + np.searchsorted(together.keys[first:end], lookup.keys[some])
                assert isinstance(lookup, PrunedLookup)
                counts[places] += lookup.counts[some]
        return self.pruned.read(located), gradients, counts


class PrunedRead(PooledRead):
    """One batch's use of a group whose chunks may be somewhere else after a pruning."""

    def __init__(
        self, group: PrunedGroup, lookup: PrunedLookup, entries: slice | Int64s, offsets: Int64s
    ) -> None:
        super().__init__(group, lookup, entries, offsets)
        self._pruner, self._moves = group.pruner, group.pruner.num_moves
        self._pruned, self._chunks = group.pruned, lookup

    def pool(self, weights: Tensor | None, out: Floats) -> None:
        """Write this group's columns of ``out``."""
        group = self.group
        self._pruned.pool_vectors(
            self._chunks, self.offsets, group.columns, group.is_mean, self._weights(weights), out
        )  # fmt: skip

    def keep_gradients(self, weights: Tensor | None, pooled_gradients: Floats) -> None:
        """Sum gradients per distinct row and leave them for the optimizer."""
        self._check_unmoved()
        group = self.group
        gradients = self._pruned.sum_gradients(
            self._chunks, group.feature_tables, self.offsets, group.columns, group.is_mean,
            self._weights(weights), pooled_gradients,
        )  # fmt: skip
        group.pending.append((self._chunks, gradients))

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


@dataclass(frozen=True)
class CollectionPruning:
    """The pruning of a whole collection: one pruner for each row size."""

    settings: PruneSettings
    pruners: list[Pruner]
    groups: list[PrunedGroup]
    early: EarlyLookups = field(default_factory=EarlyLookups)

    def locate_early(self, features: KeyedJaggedTensor) -> None:
        """Find the entries of a batch that is read some time later, in any thread."""
        self.early.put(features, [group.locate(features) for group in self.groups])

    def read(self, features: KeyedJaggedTensor, insert: bool, in_parallel: bool) -> list[PooledRead]:
        """Find or make the rows of a batch, and copy them."""
        found = self.early.take(features)
        if found is None:
            found = run_all([partial(group.locate, features) for group in self.groups], in_parallel)
        else:
            for group, one in zip(self.groups, found, strict=True):
                group.pruned.refresh(one[0])
        located = {id(group): one[0] for group, one in zip(self.groups, found, strict=True)}
        if insert:
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

    def finish_step(self, number: int) -> None:
        """Prune what is due after a step."""
        for pruner in self.pruners:
            pruner.finish_step(number)

    def report(self) -> PruneReport:
        """Which tables hold how much, and what was pruned last."""
        return report_on(self.pruners)

    def wait(self) -> None:
        """Come back when utilities are up to date."""
        for pruner in self.pruners:
            pruner.background.wait()

    def clear(self) -> None:
        """Forget every row."""
        for pruner in self.pruners:
            pruner.reset()

    @property
    def pruned_at(self) -> int:
        """The step of the latest pruning; 0: there was none."""
        return max(pruner.pruned_at for pruner in self.pruners)

    @property
    def pool_bytes(self) -> int:
        """Bytes of all chunks, used or not."""
        return sum(pruner.pool.arena.allocated_bytes for pruner in self.pruners)

    def serve(self) -> None:
        """Drop utilities and optimizer state: rows can then be read and no longer trained."""
        for pruner in self.pruners:
            pruner.serve()


def make_pruned_groups(
    tables: Sequence[EmbeddingBagConfig],
    grouped: Sequence[tuple[list[EmbeddingBagConfig], list[int]]],
    optimizer: RowOptimizerRule,
    seed: int,
    settings: PruneSettings,
) -> CollectionPruning:
    """Groups of pruned tables, given the tables of each group and their first columns in the output."""
    for config in tables:
        settings.check_dim(config.name, config.embedding_dim)
    dtype = str(tables[0].data_type).removeprefix("torch.")
    total = sum(config.embedding_dim for config in tables)
    pruners: list[Pruner] = []
    groups: list[PrunedGroup] = []
    for dim in dict.fromkeys(config.embedding_dim for config in tables):
        pool = ChunkPool(dim, settings.chunks, optimizer, dtype)
        members = [
            PrunedGroup(configs, firsts, optimizer, seed, pool)
            for configs, firsts in grouped
            if configs[0].embedding_dim == dim
        ]
        of_dim = sum(config.embedding_dim for config in tables if config.embedding_dim == dim)
        # Of a budget, tables get what their rows have of all columns.
        budget = settings.budget * of_dim // total
        pruner = Pruner(pool, [group.pruned for group in members], settings, budget, seed)
        for group in members:
            group.pruner = pruner
        pruners.append(pruner)
        groups += members
    return CollectionPruning(settings, pruners, groups)
