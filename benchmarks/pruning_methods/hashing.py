"""The hashing trick: ids of a large table share rows by their hash, so no index is needed to find one.

Done with care: a table of few ids has a row for each and pays for their index, since two of its ids in one
row would cost much and their index next to nothing. All other tables get equally many rows, but no more than
so many for each of their ids. How many ids a table has is counted in the training data beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning.deciding.hashing import mixed

Counts = npt.NDArray[np.int64]

FEW_IDS = 512
MOST_ROWS = 8  # for each id of a table: with more, hardly two of its ids share a row
INDEX_BYTES = 47  # of an id in the index of a small table
WHOLE = 0  # number of rows of a table that is not hashed


def hashed_rows(num_ids: Counts, record_bytes: int, budget: int) -> list[int]:
    """Rows of each table, `WHOLE` for those with a row an id: as many as ``budget`` bytes hold."""
    low, high = 0, int(MOST_ROWS * num_ids.max())
    while low < high:  # bisection: the most rows of a table that can be paid for
        middle = (low + high + 1) // 2
        if hashed_bytes(_rows(num_ids, middle), num_ids, record_bytes) <= budget:
            low = middle
        else:
            high = middle - 1
    return _rows(num_ids, low)


def hashed_bytes(rows: Sequence[int], num_ids: Counts, record_bytes: int) -> int:
    """Bytes of arrays of so many rows with their optimizer state, and of the indexes of small tables."""
    whole = sum(int(ids) for size, ids in zip(rows, num_ids, strict=True) if size == WHOLE)
    return (sum(rows) + whole) * record_bytes + whole * INDEX_BYTES


def _rows(num_ids: Counts, most: int) -> list[int]:
    return [WHOLE if ids <= FEW_IDS else min(max(most, 1), MOST_ROWS * int(ids)) for ids in num_ids.tolist()]


class HashedRows(nn.Module):
    """A collection whose tables have a fixed number of rows, which ids share by their hash.

    Args:
        tables: as the model wants them.
        rows: of each table; `WHOLE`: one an id.
        num_ids: of each table, for the bytes of those with a row an id.
        optimizer: of rows.
        seed: of rows and hashes.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        rows: Sequence[int],
        num_ids: Counts,
        optimizer: RowOptimizerRule,
        seed: int,
    ) -> None:
        super().__init__()
        self.rows = EmbeddingBagCollection(tables, optimizer=optimizer, seed=seed, on_unknown="default")
        dim = tables[0].embedding_dim
        self.allocated_bytes = hashed_bytes(rows, num_ids, 4 * (dim + optimizer.state_width(dim)))
        salts = mixed(np.arange(1, len(tables) + 1, dtype=np.uint64) + np.uint64(seed << 32))
        self._hashes = {
            feature: (np.uint64(size), salt)
            for table, size, salt in zip(tables, rows, salts, strict=True)
            for feature in table.feature_names
            if size != WHOLE
        }

    def table_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        return self.rows.embedding_bag_configs()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors of the rows that ids share."""
        return self.rows(self.hashed(features))

    def hashed(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same bags with numbers of rows in place of ids."""
        ids = features.values().numpy().astype(np.int64, copy=True)
        ends = features.offset_per_key()
        for name, begin, end in zip(features.keys(), ends, ends[1:], strict=False):
            if name in self._hashes:
                size, salt = self._hashes[name]
                ids[begin:end] = (mixed(ids[begin:end].view(np.uint64) ^ salt) % size).astype(np.int64)
        return KeyedJaggedTensor(
            features.keys(), torch.from_numpy(ids), features.weights_or_none(), offsets=features.offsets()
        )
