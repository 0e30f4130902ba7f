"""Wide & Deep (Cheng et al., 2016): a linear model and an MLP, trained together."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from rowhaul.nn.layers import LayerFactory, split_linear_column
from rowhaul.nn.models.base import MLPOptions, RecommendationModel


class WideAndDeepOptions(MLPOptions):
    """Options of `WideAndDeep`."""


class WideAndDeep(RecommendationModel):
    """logit = Σ linear weight of the ids + w · dense + MLP([embeddings, dense]).

    The linear weight of an id is the last column of its row, so that one row moves, not two.
    """

    Options: ClassVar[type[MLPOptions]] = WideAndDeepOptions

    def __init__(
        self,
        collection: nn.Module,
        num_dense: int,
        options: MLPOptions = WideAndDeepOptions(),
        seed: int = 0,
    ) -> None:
        super().__init__(collection, num_dense)
        self.check_linear_column()
        layers = LayerFactory(seed)
        self.wide = layers.linear(num_dense, 1, bias=False) if num_dense else None
        inputs = sum(self.widths) - len(self.widths) + num_dense
        self.deep = layers.mlp(inputs, options.hidden, options.dropout)
        self.out = layers.linear((inputs, *options.hidden)[-1], 1)

    @classmethod
    def row_width(cls, embedding_dim: int) -> int:
        """The embedding and the linear weight."""
        return embedding_dim + 1

    def logits(self, pooled: Tensor, dense: Tensor, index: Tensor) -> Tensor:
        """Logits, one per sample."""
        return self.wide_and_deep(pooled, dense, index)[0]

    def wide_and_deep(self, pooled: Tensor, dense: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """The linear part plus the MLP's, and the embeddings they read."""
        embeddings, linear = split_linear_column(pooled, self.widths)
        deep = self.deep(torch.cat([embeddings, dense], dim=1), index)
        logits: Tensor = self.out(deep).squeeze(1) + linear.sum(1)
        if self.wide is not None:
            logits = logits + self.wide(dense).squeeze(1)
        return logits, embeddings
