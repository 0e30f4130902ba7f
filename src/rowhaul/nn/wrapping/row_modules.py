"""Modules called as ``nn.Embedding`` and ``nn.EmbeddingBag`` whose tables are rows, not a parameter."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from rowhaul.errors import ConfigError
from rowhaul.nn.embedding import EmbeddingBagCollection
from rowhaul.nn.jagged import JaggedTensor, KeyedJaggedTensor
from rowhaul.nn.unpooled import EmbeddingCollection

FEATURE = "ids"  # what the one feature of these tables is called


class RowEmbedding(nn.Module):
    """A row for each id of any shape, as ``nn.Embedding``; any int64 is an id.

    Args:
        rows: a collection with one table.
        padding: the id whose vector never changes, and that vector; None: there is none.
    """

    padding_vector: Tensor | None

    def __init__(self, rows: EmbeddingCollection, padding: tuple[int, Tensor] | None = None) -> None:
        super().__init__()
        self.rows = rows
        self.padding_idx = padding[0] if padding is not None else None
        self.register_buffer("padding_vector", padding[1] if padding is not None else None)

    @property
    def embedding_dim(self) -> int:
        """Values in a row."""
        return self.rows.table_configs()[0].embedding_dim

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


class RowEmbeddingBag(nn.Module):
    """A pooled vector for each bag of ids, as ``nn.EmbeddingBag``; any int64 is an id.

    Args:
        rows: a collection with one table; weighted where it sums, since a call may weigh ids.
        include_last_offset: whether offsets end with the number of ids.
        padding_idx: the id that bags leave out; None: there is none.
    """

    def __init__(
        self, rows: EmbeddingBagCollection, include_last_offset: bool = False, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        self.rows = rows
        self.include_last_offset, self.padding_idx = include_last_offset, padding_idx

    @property
    def embedding_dim(self) -> int:
        """Values in a row."""
        return self.rows.table_configs()[0].embedding_dim

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
            return torch.ones(len(ids), dtype=self.rows.table_configs()[0].data_type)
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
        return ids, ends.diff()
