"""Modules called as ``nn.Embedding`` and ``nn.EmbeddingBag`` whose tables are rows, not a parameter."""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from rowhaul.errors import ConfigError, DataError
from rowhaul.nn.collection import TableCollection
from rowhaul.nn.embedding import EmbeddingBagCollection
from rowhaul.nn.jagged import JaggedTensor, KeyedJaggedTensor
from rowhaul.nn.unpooled import EmbeddingCollection

FEATURE = "ids"  # what the one feature of these tables is called


class RowModule(nn.Module):
    """What both modules share.

    Args:
        rows: a collection with one table.
    """

    def __init__(self, rows: TableCollection) -> None:
        super().__init__()
        self.rows = rows

    @property
    def embedding_dim(self) -> int:
        """Values in a row."""
        return self.rows.table_configs()[0].embedding_dim

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train or freeze the rows; calling it on a parent module does not reach them.

        Raises:
            ConfigError: their table was frozen when it was wrapped, and cannot be trained.
        """
        table = self.rows.table_configs()[0]
        if requires_grad and table.frozen:
            raise ConfigError(
                f"table {table.name!r} was frozen when it was wrapped, so its rows cannot be trained; "
                "unfreeze the weight, with requires_grad_(True), before rowhaul.wrap()"
            )
        self.rows.anchor.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        held = self.rows.table_configs()[0].data_type
        wanted = fn(torch.empty(0, dtype=held)).dtype
        if wanted != held:
            raise ConfigError(
                f"rows of a wrapped model are {held} and cannot become {wanted}; call double(), half() or "
                "to(dtype) before wrap(), which takes float32 and float64, or use torch.autocast. The other "
                "modules may be converted already: make the model anew"
            )
        moved: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's method has no types
        return moved


class RowEmbedding(RowModule):
    """A row for each id of any shape, as ``nn.Embedding``; any int64 is an id.

    Args:
        rows: a collection with one table.
        padding: the id whose vector never changes, and that vector; None: there is none.
    """

    rows: EmbeddingCollection
    padding_vector: Tensor | None

    def __init__(self, rows: EmbeddingCollection, padding: tuple[int, Tensor] | None = None) -> None:
        super().__init__(rows)
        self.padding_idx = padding[0] if padding is not None else None
        self.register_buffer("padding_vector", padding[1] if padding is not None else None)

    def forward(self, input: Tensor) -> Tensor:
        """Vectors of the ids, with their shape and one dimension more."""
        flat = input.reshape(-1)
        if self.padding_idx is None:
            return self._read(flat).view(*input.shape, self.embedding_dim)
        is_real = flat != self.padding_idx
        vectors = cast(Tensor, self.padding_vector).expand(len(flat), -1)
        vectors = vectors.index_put((is_real,), self._read(flat[is_real]))
        return vectors.view(*input.shape, self.embedding_dim)

    def _read(self, ids: Tensor) -> Tensor:
        lengths = torch.tensor([len(ids)], dtype=torch.int64)
        named = KeyedJaggedTensor([FEATURE], ids.cpu(), lengths=lengths, stride=1)
        return cast(dict[str, JaggedTensor], self.rows(named))[FEATURE].values()


class RowEmbeddingBag(RowModule):
    """A pooled vector for each bag of ids, as ``nn.EmbeddingBag``; any int64 is an id.

    Args:
        rows: a collection with one table; weighted where it sums, since a call may weigh ids.
        include_last_offset: whether offsets end with the number of ids.
        padding_idx: the id that bags leave out; None: there is none.
    """

    rows: EmbeddingBagCollection

    def __init__(
        self, rows: EmbeddingBagCollection, include_last_offset: bool = False, padding_idx: int | None = None
    ) -> None:
        super().__init__(rows)
        self.include_last_offset, self.padding_idx = include_last_offset, padding_idx

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Vectors of the bags: rows of ``input``, or its parts from each of ``offsets`` on."""
        ids, lengths = self._bags(input, offsets)
        weights = self._weights(ids, per_sample_weights)
        if self.padding_idx is not None:
            is_real = ids != self.padding_idx
            owner = torch.arange(len(lengths), device=ids.device).repeat_interleave(lengths)
            ids, weights = ids[is_real], weights[is_real] if weights is not None else None
            lengths = torch.bincount(owner[is_real], minlength=len(lengths))
        named = KeyedJaggedTensor(
            [FEATURE], ids.cpu(), weights=weights, lengths=lengths.cpu(), stride=len(lengths)
        )
        pooled: Tensor = self.rows(named).values()
        return pooled

    def _weights(self, ids: Tensor, given: Tensor | None) -> Tensor | None:
        if not self.rows.is_weighted():
            if given is not None:
                raise ConfigError("per_sample_weights are for mode='sum', as in nn.EmbeddingBag")
            return None
        if given is None:
            return torch.ones(len(ids), dtype=self.rows.table_configs()[0].data_type, device=ids.device)
        if given.numel() != len(ids):
            raise ConfigError(f"per_sample_weights need one number an id, {len(ids)}, got {given.numel()}")
        return given.reshape(-1)

    def _bags(self, ids: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        """All ids in one dimension, and the number in each bag."""
        if ids.dim() == 2:
            if offsets is not None:
                raise ConfigError("ids in two dimensions are bags by themselves; leave out the offsets")
            return ids.reshape(-1), torch.full((len(ids),), ids.shape[1], device=ids.device)
        if offsets is None or ids.dim() != 1:
            raise ConfigError(
                f"ids must be in two dimensions, or in one with offsets; got shape {tuple(ids.shape)}, "
                f"offsets {'missing' if offsets is None else tuple(offsets.shape)}"
            )
        ends = offsets if self.include_last_offset else torch.cat([offsets, offsets.new_tensor([len(ids)])])
        lengths = ends.diff()
        if not len(ends) or ends[0] != 0 or ends[-1] != len(ids) or (lengths < 0).any():
            last = f", end with the number of ids, {len(ids)}" if self.include_last_offset else ""
            raise DataError(f"offsets must begin with 0{last} and never fall, got {offsets}")
        return ids, lengths
