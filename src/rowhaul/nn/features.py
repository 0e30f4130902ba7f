"""Which features read which tables, and where their vectors go: the fixed part of a collection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rowhaul.errors import ConfigError
from rowhaul.nn.config import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.optim import RowOptimizerRule
from rowhaul.store import TableGroup, TableSpec
from rowhaul.store.packing import PLAIN

Int64s = npt.NDArray[np.int64]


class FeatureGroup:
    """Features over tables of one row size; ``specs`` are the tables, ``columns`` where vectors begin."""

    def __init__(self, configs: Sequence[EmbeddingConfig], first_columns: Sequence[int]) -> None:
        self.dim = configs[0].embedding_dim
        self.dtype: torch.dtype = configs[0].data_type
        self.specs = tuple(
            TableSpec(config.name, self.dim, *config.initial_range, config.init_fn) for config in configs
        )
        self.features = [name for config in configs for name in config.feature_names]
        num_features = [len(config.feature_names) for config in configs]
        self.feature_tables = np.repeat(np.arange(len(configs)), num_features)
        self.column_tables = self.feature_tables  # whose rows the vectors in each of ``columns`` are made of
        self.columns = np.concatenate(
            [
                first + self.dim * np.arange(count)
                for first, count in zip(first_columns, num_features, strict=True)
            ]
        )
        is_mean = [getattr(config, "pooling", None) is PoolingType.MEAN for config in configs]
        self.is_mean = np.repeat(np.array(is_mean, dtype=np.bool_), num_features)

    def make_tables(self, optimizer: RowOptimizerRule, seed: int, row_dtype: str = PLAIN) -> TableGroup:
        """Make the group's tables, empty."""
        return TableGroup(self.specs, optimizer, str(self.dtype).removeprefix("torch."), seed, row_dtype)

    def ids_of(
        self, features: KeyedJaggedTensor
    ) -> tuple[tuple[Int64s, Int64s, Int64s], slice | Int64s, Int64s]:
        """Select a batch's ids as `TableGroup.lookup` takes them; also which they are, and their bags."""
        entries, offsets = _select(features, self.features)
        values = features.values().detach().cpu().numpy()[entries]
        num_samples = features.stride()
        starts = offsets[::num_samples] if num_samples else np.zeros(len(self.features) + 1, dtype=np.int64)
        ids = np.ascontiguousarray(values, dtype=np.int64), np.ascontiguousarray(starts), self.feature_tables
        return ids, entries, offsets


class UnpooledGroup(FeatureGroup):
    """The features of one table, each id a vector of its own.

    A row source sees one column of bags with one id each, so it reads, sums and steps as it does for bags.
    """

    def __init__(self, config: EmbeddingConfig) -> None:
        super().__init__([config], [0])
        self.columns = np.zeros(1, np.int64)
        self.column_tables = np.zeros(1, np.int64)
        self.is_mean = np.zeros(1, np.bool_)

    def ids_of(
        self, features: KeyedJaggedTensor
    ) -> tuple[tuple[Int64s, Int64s, Int64s], slice | Int64s, Int64s]:
        """Select a batch's ids; every one is a bag."""
        ids, entries, _ = super().ids_of(features)
        return ids, entries, np.arange(len(ids[0]) + 1)


def group_features(tables: Sequence[EmbeddingBagConfig]) -> list[FeatureGroup]:
    """Group tables of one row size, in as many groups as threads can share the work of."""
    widths = [config.embedding_dim * len(config.feature_names) for config in tables]
    first_columns = [sum(widths[:position]) for position in range(len(tables))]
    num_threads = torch.get_num_threads()
    groups = []
    for dim in dict.fromkeys(config.embedding_dim for config in tables):
        members = [position for position, config in enumerate(tables) if config.embedding_dim == dim]
        size = -(-len(members) // num_threads)
        for begin in range(0, len(members), size):
            some = members[begin : begin + size]
            groups.append(FeatureGroup([tables[p] for p in some], [first_columns[p] for p in some]))
    return groups


def _select(features: KeyedJaggedTensor, names: Sequence[str]) -> tuple[slice | Int64s, Int64s]:
    """Which ids of ``features`` belong to the named ones, in that order, and the offsets of their bags."""
    known = features.keys()
    absent = [name for name in names if name not in known]
    if absent:
        raise ConfigError(f"feature {absent[0]!r} is missing; the batch has {', '.join(known)}")
    positions = [known.index(name) for name in names]
    stride = features.stride()
    offsets = features.offsets().cpu().numpy().astype(np.int64, copy=False)
    first = positions[0]
    if positions == list(range(first, first + len(positions))):
        bags = offsets[first * stride : (first + len(positions)) * stride + 1]
        return slice(int(bags[0]), int(bags[-1])), bags - bags[0]
    lengths = np.diff(offsets).reshape(len(known), stride)[positions].reshape(-1)
    parts = [np.arange(offsets[p * stride], offsets[(p + 1) * stride]) for p in positions]
    return np.concatenate(parts), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
