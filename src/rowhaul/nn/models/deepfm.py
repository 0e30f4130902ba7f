"""DeepFM (Guo et al., 2017): a factorisation machine and an MLP over the same embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rowhaul.nn.batch import Batch
from rowhaul.nn.layers import LayerFactory, split_linear_column
from rowhaul.nn.models.base import MLPOptions, RecommendationModel


class DeepFMOptions(MLPOptions):
    """Options of `DeepFM`."""


class DeepFM(RecommendationModel):
    """logit = Σ linear weight of the ids + w · dense + Σ_{i<j} ⟨v_i, v_j⟩ + MLP([v_1 … v_F, dense]).

    The linear weight of an id is the last column of its row, so that one row moves, not two.
    """

    Options = DeepFMOptions

    def __init__(
        self,
        collection: nn.Module,
        num_dense: int,
        options: DeepFMOptions = DeepFMOptions(),
        seed: int = 0,
    ) -> None:
        super().__init__(collection, num_dense)
        self.check_linear_column()
        self.embedding_dim = self.common_width() - 1
        layers = LayerFactory(seed)
        self.first_order = layers.linear(num_dense, 1, bias=False) if num_dense else None
        inputs = len(self.features) * self.embedding_dim + num_dense
        self.deep = layers.mlp(inputs, options.hidden, options.dropout)
        self.out = layers.linear((inputs, *options.hidden)[-1], 1)

    @classmethod
    def row_width(cls, embedding_dim: int) -> int:
        """The embedding and the linear weight."""
        return embedding_dim + 1

    def forward(self, batch: Batch) -> Tensor:
        """Logits, one per sample."""
        pooled, dense = self.read(batch)
        embeddings, linear = split_linear_column(pooled, self.widths)
        deep = self.deep(torch.cat([embeddings, dense], dim=1), batch.index)
        logits: Tensor = self.out(deep).squeeze(1) + linear.sum(1) + self._second_order(embeddings)
        return logits if self.first_order is None else logits + self.first_order(dense).squeeze(1)

    def _second_order(self, embeddings: Tensor) -> Tensor:
        """Σ_{i<j} ⟨v_i, v_j⟩ = (‖Σ v_i‖² − Σ ‖v_i‖²) / 2, in time linear in the features."""
        total = embeddings.view(len(embeddings), len(self.features), self.embedding_dim).sum(1)
        return (total.square().sum(1) - embeddings.square().sum(1)) / 2
