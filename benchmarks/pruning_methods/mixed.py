"""Mixed dimensions (Ginart et al., 2021): rows of rare ids are narrow, and a learned matrix widens them.

The sizes are fixed before training, by table: the rows of a table get ``dim * (p / p_max) ** alpha`` values,
where ``p`` is how often a row of the table is read on average, counted in the training data beforehand.
``alpha`` is chosen so that the values of all tables together are the share asked for. Each table has a
projection to the common size, trained with the dense weights. No row has fewer than one value, so with
rows of 32 values no more than 96.9 % can be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning.deciding.entries import BLOCK_BYTES
from rowhaul.store.arena import RecordArena

Counts = npt.NDArray[np.int64]


def popularity_dims(num_rows: Counts, num_reads: Counts, dim: int, share: float) -> list[int]:
    """Row sizes of the tables: by popularity, with at most ``share`` of the values where that can be."""
    popularity = num_reads / np.maximum(num_rows, 1)
    relative = popularity / popularity.max()
    most = share * dim * num_rows.sum()

    def sizes(alpha: float) -> Counts:
        return np.clip(np.floor(dim * relative**alpha), 1, dim).astype(np.int64)

    low, high = 0.0, 64.0
    for _ in range(60):  # bisection: values only become fewer as alpha grows
        middle = (low + high) / 2
        if int(sizes(middle) @ num_rows) > most:
            low = middle
        else:
            high = middle
    return [int(size) for size in sizes(high)]


class MixedDimensions(nn.Module):
    """A collection whose tables have rows of different sizes, seen from outside as rows of one size.

    Args:
        tables: as the model wants them, all of one size.
        dims: the size that rows of each table really have.
        optimizer: of rows.
        seed: of rows and projections.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        dims: Sequence[int],
        optimizer: RowOptimizerRule,
        seed: int,
    ) -> None:
        super().__init__()
        self._configs = list(tables)
        narrow = [replace(table, embedding_dim=dim) for table, dim in zip(tables, dims, strict=True)]
        self.rows = EmbeddingBagCollection(narrow, optimizer=optimizer, seed=seed, on_unknown="default")
        for group in self.rows.source.tables:  # a size may have few rows: blocks as small as pruned ones
            arena = group.arena
            group.arena = RecordArena(arena.width, arena.dtype, BLOCK_BYTES)
        random = torch.Generator().manual_seed(seed)
        weights = {}
        for table, dim in zip(tables, dims, strict=True):
            if dim < table.embedding_dim:  # whole rows are what they are
                shape = (dim, table.embedding_dim)
                weights[table.name] = nn.Parameter(torch.empty(shape, dtype=table.data_type))
                nn.init.xavier_uniform_(weights[table.name], generator=random)
        self.projections = nn.ParameterDict(weights)

    def table_configs(self) -> list[EmbeddingBagConfig]:
        """The tables as they seem to be."""
        return self._configs

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors of the common size. Pooling is linear, so pooled rows are projected, not each."""
        pooled = self.rows(features)
        columns = dict(zip(pooled.keys(), pooled.values().split(pooled.length_per_key(), dim=1), strict=True))
        vectors: list[Tensor] = []
        for table in self._configs:
            for feature in table.feature_names:
                vector = columns[feature]
                if table.name in self.projections:
                    vector = vector @ self.projections[table.name]
                vectors.append(vector)
        widths = [vector.shape[1] for vector in vectors]
        return KeyedTensor(pooled.keys(), widths, torch.cat(vectors, dim=1))
