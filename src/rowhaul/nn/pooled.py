"""Pooling the rows of a batch, and the way back for gradients: what autograd sees of a row source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.row_source import RowRead
from rowhaul.nn.threads import run_all
from rowhaul.store import Lookup, TableGroup
from rowhaul.store.arena import RecordArena
from rowhaul.store.packing import RowPacking
from rowhaul.store.packing_kernels import pool_packed
from rowhaul.store.pooling import pool_rows, sum_row_gradients, sum_weight_gradients

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]
KeepGradients = Callable[[Lookup, Floats], None]


def is_worth_threads(num_values: int) -> bool:
    """Whether pooling this many values takes longer than waking a thread."""
    return num_values > 1 << 16


class PooledRead:
    """A `RowRead` over records in an arena of this process.

    Args:
        group: the features.
        arena: where the records are.
        lookup: the rows of the batch.
        entries: which ids of the batch they are.
        offsets: of the bags.
        keep: takes the gradients of the distinct rows.
    """

    device: torch.device = torch.device("cpu")

    def __init__(
        self,
        group: FeatureGroup,
        arena: RecordArena,
        lookup: Lookup,
        entries: slice | Int64s,
        offsets: Int64s,
        keep: KeepGradients,
    ) -> None:
        self.group, self.arena, self.lookup = group, arena, lookup
        self.entries, self.offsets, self.keep = entries, offsets, keep

    def pool(self, weights: Tensor | None, out: Floats) -> None:
        """Write this group's columns of ``out``."""
        group = self.group
        pool_rows(
            *self._rows(), self.lookup.inverse, self.offsets, group.columns, group.dim, group.is_mean,
            self.weights_of(weights), out, out.ctypes.data,
        )  # fmt: skip

    def keep_gradients(self, weights: Tensor | None, pooled_gradients: Floats) -> None:
        """Sum gradients per distinct row and keep them for the step."""
        group = self.group
        gradients = np.empty((len(self.lookup.keys), group.dim), dtype=pooled_gradients.dtype)
        sum_row_gradients(
            self.lookup.inverse, self.offsets, group.columns, group.is_mean, self.weights_of(weights),
            pooled_gradients, pooled_gradients.ctypes.data, gradients,
        )  # fmt: skip
        self.keep(self.lookup, gradients)

    def weight_gradients(self, pooled_gradients: Floats) -> Floats:
        """Return the gradient of each id's weight."""
        out = np.empty(len(self.lookup.inverse), dtype=pooled_gradients.dtype)
        sum_weight_gradients(
            *self._rows(), self.lookup.inverse, self.offsets, self.group.columns, self.group.dim,
            self.group.is_mean, pooled_gradients, out,
        )  # fmt: skip
        return out

    def _rows(self) -> tuple[Any, ...]:
        arena, lookup = self.arena, self.lookup
        return arena.addresses, arena.shift, arena.width, lookup.locations, lookup.spare.ctypes.data

    def weights_of(self, weights: Tensor | None) -> Floats:
        """Select the weights of this read's ids; none: an empty array."""
        if weights is None:
            return np.empty(0, dtype=str(self.group.dtype).removeprefix("torch."))
        return np.ascontiguousarray(weights.detach().cpu().to(self.group.dtype).numpy()[self.entries])


class PackedRead(PooledRead):
    """A `RowRead` over packed records; rows that are not stored come unpacked."""

    def __init__(self, packing: RowPacking, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._packing = packing

    def pool(self, weights: Tensor | None, out: Floats) -> None:
        """Write this group's columns of ``out``."""
        group = self.group
        pool_packed(
            *self._rows(), self.lookup.inverse, self.offsets, group.columns, group.dim, group.is_mean,
            self.weights_of(weights), out, out.ctypes.data, self._packing.like,
        )  # fmt: skip

    def weight_gradients(self, pooled_gradients: Floats) -> Floats:
        """Return the gradient of each id's weight; the rows are unpacked first."""
        lookup = self.lookup
        rows = np.empty((len(lookup.locations), self.group.dim), np.float32)
        stored = lookup.locations >= 0
        rows[stored] = self._packing.read(self.arena, lookup.locations[stored])[:, : self.group.dim]
        rows[~stored] = lookup.spare[-1 - lookup.locations[~stored]]
        unpacked = Lookup(lookup.keys, lookup.starts, lookup.inverse, -1 - np.arange(len(rows)), rows)
        return PooledRead(
            self.group, self.arena, unpacked, self.entries, self.offsets, self.keep
        ).weight_gradients(pooled_gradients)


@runtime_checkable
class PooledTables(Protocol):
    """Tables that read their records themselves, such as those on a card."""

    def pooled_read(
        self,
        group: FeatureGroup,
        lookup: Lookup,
        entries: slice | Int64s,
        offsets: Int64s,
        keep: KeepGradients,
    ) -> PooledRead:
        """Return a `RowRead` over these records."""


def pooled_read(
    tables: TableGroup,
    group: FeatureGroup,
    lookup: Lookup,
    entries: slice | Int64s,
    offsets: Int64s,
    keep: KeepGradients,
) -> PooledRead:
    """Return a `RowRead` over the records of tables, packed or not, wherever they are."""
    if isinstance(tables, PooledTables):
        return tables.pooled_read(group, lookup, entries, offsets, keep)
    arguments = group, tables.arena, lookup, entries, offsets, keep
    if tables.packing is not None:
        return PackedRead(tables.packing, *arguments)
    return PooledRead(*arguments)


class PoolRows(torch.autograd.Function):
    """Pooled vectors forward; on the way back row gradients stay with their source."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
        reads: Sequence[RowRead],
        frozen: Sequence[slice] = (),
    ) -> Tensor:
        """Vectors of ``shape`` samples × all columns; ``anchor`` only ties the rows into the graph.

        ``frozen`` are columns of rows that take no gradient: they step by zeros.
        """
        device = reads[0].device
        out = torch.empty(shape, dtype=dtype, device=device)
        in_threads = device.type == "cpu" and is_worth_threads(out.numel())
        run_all([partial(read.pool, weights, as_array(out)) for read in reads], in_threads)
        ctx.reads, ctx.frozen = reads, frozen
        # Saved the official way, so that changing the weights or a second backward is noticed.
        ctx.save_for_backward(anchor, weights)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, pooled_gradients: Tensor) -> tuple[Any, ...]:
        """Keep row gradients, return those of the weights."""
        _, weights = ctx.saved_tensors
        device = ctx.reads[0].device
        gradients = pooled_gradients.detach().to(device).contiguous()
        if ctx.needs_input_grad[0] and _is_reached(ctx.next_functions[0][0]):
            of_rows = gradients.clone() if ctx.frozen else gradients
            for columns in ctx.frozen:
                of_rows[:, columns] = 0
            in_threads = device.type == "cpu" and is_worth_threads(gradients.numel())
            run_all(
                [partial(read.keep_gradients, weights, as_array(of_rows)) for read in ctx.reads], in_threads
            )
        weight_gradients = None
        if ctx.needs_input_grad[1]:
            # NumPy has no bfloat16; sums are made in the wider of both types.
            wide = torch.promote_types(weights.dtype, gradients.dtype)
            sums = torch.zeros(weights.shape, dtype=wide, device=device)
            for read in ctx.reads:
                found = read.weight_gradients(as_array(gradients))
                # Not +=: a feature that reads two tables has its entries in a group twice.
                if isinstance(found, Tensor):
                    places = torch.arange(len(weights), device=device)[read.entries]
                    sums.index_put_((places,), found.to(sums), accumulate=True)
                else:
                    np.add.at(sums.numpy(), read.entries, found)
            weight_gradients = sums.to(weights.device, weights.dtype)
        return None, weight_gradients, None, None, None, None


def _is_reached(anchor: Any) -> bool:
    """Whether this backward is for the rows, too, not for other tensors alone, such as weights."""
    try:
        return bool(torch._C._will_engine_execute_node(anchor))
    except RuntimeError:  # the anchor itself is among those tensors
        return True


def as_array(tensor: Tensor) -> Any:
    """Return a tensor as row reads take it: NumPy's in host memory, PyTorch's on a card."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor
