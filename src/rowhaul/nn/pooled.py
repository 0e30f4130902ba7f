"""How a batch reads and updates the tables of one row size; what autograd sees of it.

`FeatureGroup` ties a group of tables to the features that read them, `PooledRead` is one batch's use
of it, and `PoolRows` strings several of them into one differentiable step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.errors import ConfigError
from rowhaul.nn.config import EmbeddingBagConfig, PoolingType
from rowhaul.nn.jagged import KeyedJaggedTensor
from rowhaul.nn.threads import run_all
from rowhaul.optim import RowOptimizerRule
from rowhaul.store import Lookup, TableGroup, TableSpec
from rowhaul.store.matching import KnownLookup, KnownRows, match_keys
from rowhaul.store.pooling import pool_rows, sum_row_gradients, sum_weight_gradients

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]


def is_worth_threads(num_values: int) -> bool:
    """Whether pooling so many values takes longer than waking a thread."""
    return num_values > 1 << 16


class FeatureGroup:
    """Tables of one row size, the features that read them, and where their vectors go in the output."""

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        first_columns: Sequence[int],
        optimizer: RowOptimizerRule,
        seed: int,
        make_tables: Callable[[Sequence[TableSpec], RowOptimizerRule, str, int], TableGroup] = TableGroup,
    ) -> None:
        dim = configs[0].embedding_dim
        self.dtype: torch.dtype = configs[0].data_type
        specs = [TableSpec(config.name, dim, *config.initial_range) for config in configs]
        self.tables = make_tables(specs, optimizer, str(self.dtype).removeprefix("torch."), seed)
        self.features = [name for config in configs for name in config.feature_names]
        num_features = [len(config.feature_names) for config in configs]
        self.feature_tables = np.repeat(np.arange(len(configs)), num_features)
        self.columns = np.concatenate(
            [first + dim * np.arange(count) for first, count in zip(first_columns, num_features, strict=True)]
        )
        is_mean = [config.pooling is PoolingType.MEAN for config in configs]
        self.is_mean = np.repeat(np.array(is_mean, dtype=np.bool_), num_features)
        self.pending: list[tuple[Lookup, Floats]] = []
        self.known: KnownRows | None = None  # the rows of the batch that is read next, where they are known
        # Makes the rows of distinct keys, given table by table, where the tables do not hold them.
        self.assemble: Callable[[Int64s, Int64s], Floats] | None = None

    def read(self, features: KeyedJaggedTensor, *, insert: bool, on_unknown: str) -> PooledRead:
        """Locate the rows that a batch reads."""
        ids, entries, offsets = self.ids_of(features)
        lookup: Lookup | None = None
        if self.assemble is not None:
            keys, starts, inverse = self.tables.distinct(*ids)
            rows = self.assemble(keys, starts)
            return PooledRead(
                self, Lookup(keys, starts, inverse, -1 - np.arange(len(keys)), rows), entries, offsets
            )
        if self.known is not None:
            lookup = match_keys(self.known, *ids, np.empty((0, self.tables.dim), self.tables.dtype))
        if lookup is None:  # nothing is known, or this is another batch
            lookup = self.tables.lookup(*ids, insert=insert, on_unknown=on_unknown)
        return PooledRead(self, lookup, entries, offsets)

    def ids_of(
        self, features: KeyedJaggedTensor
    ) -> tuple[tuple[Int64s, Int64s, Int64s], slice | Int64s, Int64s]:
        """The group's ids of a batch as `TableGroup.lookup` takes them, which they are, and their bags."""
        entries, offsets = _select(features, self.features)
        values = features.values().detach().cpu().numpy()[entries]
        num_samples = features.stride()
        starts = offsets[::num_samples] if num_samples else np.zeros(len(self.features) + 1, dtype=np.int64)
        ids = np.ascontiguousarray(values, dtype=np.int64), np.ascontiguousarray(starts), self.feature_tables
        return ids, entries, offsets

    def take_gradients(self) -> tuple[Lookup, Floats] | None:
        """All gradients left by backward passes, summed per row, with the rows they are for."""
        if not self.pending:
            return None
        lookup, gradients = self.pending[0]
        if len(self.pending) > 1:
            lookup, gradients = summed(self.pending, self.tables)
        self.pending.clear()
        return lookup, gradients

    def step(self, lr: float, number: int) -> None:
        """One optimizer step with all gradients left by backward passes."""
        taken = self.take_gradients()
        if taken is not None:
            self.tables.update(taken[0].locations, taken[1], lr, number)


def tables_of_keys(lookup: Lookup) -> Int64s:
    """The position of each distinct key's table."""
    if isinstance(lookup, KnownLookup):
        return lookup.tables
    return np.repeat(np.arange(len(lookup.starts) - 1), np.diff(lookup.starts))


def summed(parts: list[tuple[Lookup, Floats]], tables: TableGroup) -> tuple[Lookup, Floats]:
    """The gradients of several passes as those of one: each row once, parts added in order."""
    table_of_key = [tables_of_keys(lookup) for lookup, _ in parts]
    rows = np.stack([np.concatenate(table_of_key), np.concatenate([lookup.keys for lookup, _ in parts])])
    distinct, first, where = np.unique(rows, axis=1, return_index=True, return_inverse=True)
    gradients = np.zeros((len(first), tables.dim), dtype=tables.dtype)
    np.add.at(gradients, where.reshape(-1), np.concatenate([part for _, part in parts]))
    starts = np.searchsorted(distinct[0], np.arange(len(tables.tables) + 1))
    locations = np.concatenate([lookup.locations for lookup, _ in parts])[first]
    nothing = np.empty(0, dtype=np.int32)
    return Lookup(np.ascontiguousarray(distinct[1]), starts, nothing, locations, parts[0][0].spare), gradients


class PooledRead:
    """One batch's use of one group: what forward and backward share."""

    def __init__(self, group: FeatureGroup, lookup: Lookup, entries: slice | Int64s, offsets: Int64s) -> None:
        self.group, self.lookup, self.entries, self.offsets = group, lookup, entries, offsets
        self.arena = group.tables.arena  # another one once the tables are cleared

    def pool(self, weights: Tensor | None, out: Floats) -> None:
        """Write this group's columns of ``out``."""
        pool_rows(
            *self._rows(), self.lookup.inverse, self.offsets, self.group.columns, self.group.tables.dim,
            self.group.is_mean, self._weights(weights), out, out.ctypes.data,
        )  # fmt: skip

    def keep_gradients(self, weights: Tensor | None, pooled_gradients: Floats) -> None:
        """Sum gradients per distinct row and leave them for the optimizer."""
        group = self.group
        if self.arena is not group.tables.arena:
            raise ConfigError("rows were cleared or loaded between forward and backward; run forward again")
        gradients = np.empty((len(self.lookup.keys), group.tables.dim), dtype=group.tables.dtype)
        sum_row_gradients(
            self.lookup.inverse, self.offsets, group.columns, group.is_mean, self._weights(weights),
            pooled_gradients, pooled_gradients.ctypes.data, gradients,
        )  # fmt: skip
        group.pending.append((self.lookup, gradients))

    def weight_gradients(self, pooled_gradients: Floats) -> Floats:
        """Gradient of each id's weight."""
        out = np.empty(len(self.lookup.inverse), dtype=self.group.tables.dtype)
        sum_weight_gradients(
            *self._rows(), self.lookup.inverse, self.offsets, self.group.columns, self.group.tables.dim,
            self.group.is_mean, pooled_gradients, out,
        )  # fmt: skip
        return out

    def _rows(self) -> tuple[Any, ...]:
        arena, lookup = self.arena, self.lookup
        return arena.addresses, arena.shift, arena.width, lookup.locations, lookup.spare.ctypes.data

    def _weights(self, weights: Tensor | None) -> Floats:
        if weights is None:
            return np.empty(0, dtype=self.group.tables.dtype)
        return np.ascontiguousarray(weights.detach().cpu().to(self.group.dtype).numpy()[self.entries])


class PoolRows(torch.autograd.Function):
    """Pooled vectors forward; on the way back row gradients stay with their groups."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, weights: Tensor | None, shape: tuple[int, int], reads: list[PooledRead]
    ) -> Tensor:
        """Vectors of ``shape`` samples × all columns; ``anchor`` only ties the rows into the graph."""
        out = torch.empty(shape, dtype=reads[0].group.dtype)
        run_all([partial(read.pool, weights, out.numpy()) for read in reads], is_worth_threads(out.numel()))
        ctx.reads = reads
        # Saved the official way, so that changing the weights or a second backward is noticed.
        ctx.save_for_backward(anchor, weights)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, pooled_gradients: Tensor) -> tuple[Any, ...]:
        """Keep row gradients, return those of the weights."""
        _, weights = ctx.saved_tensors
        gradients = pooled_gradients.detach().cpu().contiguous().numpy()
        if ctx.needs_input_grad[0]:
            run_all(
                [partial(read.keep_gradients, weights, gradients) for read in ctx.reads],
                is_worth_threads(gradients.size),
            )
        weight_gradients = None
        if ctx.needs_input_grad[1]:
            weight_gradients = torch.zeros_like(weights)
            for read in ctx.reads:
                # Not +=: a feature that reads two tables has its entries in a group twice.
                np.add.at(weight_gradients.numpy(), read.entries, read.weight_gradients(gradients))
        return None, weight_gradients, None, None


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
