"""A collection of rows that start small and grow, in the place of one whose rows all have one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from pruning_methods.growing_rows import LEVEL, RECORD, GrowingRows, Read
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor, PoolingType
from rowhaul.nn.features import FeatureGroup
from rowhaul.optim import RowOptimizerRule
from rowhaul.store import TableSpec


class GrowingCollection(EmbeddingBagCollection):
    """Pooled vectors of the common size from rows of several sizes: each table and size has a projection.

    Args:
        tables: as the model wants them, all of one size and summed over bags.
        optimizer: of rows.
        seed: of rows and projections.
        share: of the values of whole rows that may be held.
        period: steps between growing.
        smallest: the size that rows start with; each next size is twice the one before.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        *,
        optimizer: RowOptimizerRule,
        seed: int,
        share: float,
        period: int,
        smallest: int = 2,
    ) -> None:
        super().__init__(tables, optimizer=optimizer, seed=seed, on_unknown="default")
        if any(table.pooling is not PoolingType.SUM for table in tables):
            raise ValueError("growing rows are summed over bags; use PoolingType.SUM")
        self.dim, self.period = tables[0].embedding_dim, period
        sizes = [smallest]
        while 2 * sizes[-1] <= self.dim:
            sizes.append(2 * sizes[-1])
        specs = [TableSpec(table.name, smallest, *table.initial_range) for table in tables]
        self.store = GrowingRows(specs, optimizer, seed, [*sizes[:-1], self.dim], share)
        self._selection: FeatureGroup = _selection(tables)
        random = torch.Generator().manual_seed(seed)
        shapes = [(len(tables), size, self.dim) for size in self.store.sizes]
        self.projections = nn.ParameterList(
            torch.randn(shape, generator=random) / self.dim**0.5 for shape in shapes
        )
        self._entered: set[tuple[int, int]] = set()  # levels and tables that rows have grown to
        self._pending: list[tuple[Read, list[tuple[npt.NDArray[np.int64], Tensor]]]] = []

    @property
    def allocated_bytes(self) -> int:
        """Bytes held by rows, optimizer state, entries and index; projections are dense weights."""
        return self.store.allocated_bytes

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors of every feature."""
        ids, _, offsets = self._selection.ids_of(features)
        read = self.store.locate(*ids, insert=self.training)
        num_features, num_samples = len(self._selection.features), features.stride()
        feature_tables = torch.from_numpy(self._selection.feature_tables)
        total = torch.zeros(num_features, num_samples, self.dim)
        parts = []
        for level, size in enumerate(self.store.sizes):
            which = np.flatnonzero(read.held[:, LEVEL] == level)
            records = read.held[which, RECORD].astype(np.int64)
            values = torch.from_numpy(self.store.arenas[level].read(records)[:, :size].copy())
            values.requires_grad_(self.training)
            parts.append((which, values))
            if not len(which):
                continue
            places = np.full(len(read.keys), len(which))  # rows of other sizes read as nothing
            places[which] = np.arange(len(which))
            pooled = embedding_bag(
                torch.from_numpy(places[read.inverse]),
                torch.cat([values, values.new_zeros(1, size)]),
                torch.from_numpy(offsets),
                mode="sum",
                include_last_offset=True,
                padding_idx=len(which),
            )
            projection = self.projections[level][feature_tables]
            total = torch.baddbmm(total, pooled.view(num_features, num_samples, size), projection)
        if self.training:
            self._pending.append((read, parts))
        vectors = total.transpose(0, 1).reshape(num_samples, num_features * self.dim)
        return KeyedTensor(self._keys, self._dims, vectors)

    def apply_gradients(self, lr: float, number: int) -> None:
        """Step every row that was read; let rows grow if it is time."""
        for read, parts in self._pending:
            norms = np.zeros(len(read.keys), dtype=np.float32)
            for level, (which, values) in enumerate(parts):
                if values.grad is None:
                    continue
                gradients = values.grad.numpy()
                records = read.held[which, RECORD].astype(np.int64)
                self.store.optimizer.step(self.store.arenas[level], records, gradients, lr, number)
                norms[which] = np.linalg.norm(gradients, axis=1)
            self.store.learn(read, norms)
        self._pending.clear()
        if number % self.period == 0:
            self.store.grow(self._widened)

    def drop_gradients(self) -> None:
        """Forget row gradients that were not applied."""
        self._pending.clear()

    def _widened(self, level: int, table: int, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What wider rows must be for their projections to come as near as can be to those of today."""
        with torch.no_grad():
            narrow, wide = self.projections[level][table], self.projections[level + 1][table]
            if (level, table) not in self._entered:  # the first ones bring their projection along
                self._entered.add((level, table))
                wide[: len(narrow)] = narrow
            widened: npt.NDArray[Any] = (torch.from_numpy(values) @ narrow @ torch.linalg.pinv(wide)).numpy()
        return widened


def _selection(tables: Sequence[EmbeddingBagConfig]) -> FeatureGroup:
    """Find the ids of all tables in a batch."""
    widths = [table.embedding_dim * len(table.feature_names) for table in tables]
    first_columns = [sum(widths[:position]) for position in range(len(tables))]
    return FeatureGroup(tables, first_columns)
