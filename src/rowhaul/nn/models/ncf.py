"""Neural collaborative filtering (He et al., 2017): NeuMF, a matrix factorisation beside an MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rowhaul.errors import ConfigError
from rowhaul.nn.layers import LayerFactory
from rowhaul.nn.models.base import MLPOptions, RecommendationModel


@dataclass(frozen=True)
class NeuMFOptions(MLPOptions):
    """Options of `NeuMF`.

    Args:
        user: the id feature of the user; empty: the first of the collection.
        item: the id feature of the item; empty: the second of the collection.
    """

    user: str = ""
    item: str = ""


class NeuMF(RecommendationModel):
    """logit = w · [g_user ⊙ g_item, MLP([m_user, m_item, other features, dense])].

    User and item have two embeddings each: g is the first half of a row, m the second. Other
    features, if any, join the MLP with their whole row, and so do dense columns.
    """

    Options = NeuMFOptions

    def __init__(
        self, collection: nn.Module, num_dense: int, options: NeuMFOptions = NeuMFOptions(), seed: int = 0
    ) -> None:
        super().__init__(collection, num_dense)
        user, item = self._position(options.user, 0), self._position(options.item, 1)
        if user == item or self.widths[user] != self.widths[item] or self.widths[user] % 2:
            raise ConfigError(
                "NeuMF needs two different features with rows of one even width (two embeddings), got "
                f"user {self.features[user]!r} with {self.widths[user]} columns and "
                f"item {self.features[item]!r} with {self.widths[item]}"
            )
        half = self.widths[user] // 2
        self.part_sizes: list[int] = []
        self.factor_parts: list[int] = []
        for position, width in enumerate(self.widths):
            if position in (user, item):
                self.factor_parts.append(len(self.part_sizes))
                self.part_sizes += [half, half]
            else:
                self.part_sizes.append(width)
        layers = LayerFactory(seed)
        inputs = sum(self.widths) - 2 * half + num_dense
        self.mlp = layers.mlp(inputs, options.hidden, options.dropout)
        self.out = layers.linear(half + (inputs, *options.hidden)[-1], 1)

    @classmethod
    def row_width(cls, embedding_dim: int) -> int:
        """One embedding for the factorisation, one for the MLP."""
        return 2 * embedding_dim

    def logits(self, pooled: Tensor, dense: Tensor, index: Tensor) -> Tensor:
        """Logits, one per sample."""
        parts = list(torch.split_with_sizes(pooled, self.part_sizes, dim=1))
        second, first = (parts.pop(position) for position in reversed(self.factor_parts))
        deep = self.mlp(torch.cat([*parts, dense], dim=1), index)
        logits: Tensor = self.out(torch.cat([first * second, deep], dim=1)).squeeze(1)
        return logits

    def _position(self, name: str, default: int) -> int:
        if not name and default < len(self.features):
            return default
        if name not in self.features:
            wanted = f"no id feature {name!r}" if name else "NeuMF needs a user and an item feature"
            raise ConfigError(f"{wanted}; the id features are {', '.join(self.features)}")
        return self.features.index(name)
