"""HugeCTR's "legacy" model: every feature sparse, one MLP over the embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rowhaul.nn.layers import LayerFactory
from rowhaul.nn.models.base import MLPOptions, RecommendationModel


@dataclass(frozen=True)
class LegacyOptions(MLPOptions):
    """Options of `Legacy`.

    Args:
        use_dense: whether dense columns join the MLP's input; the published model has none.
    """

    use_dense: bool = True


class Legacy(RecommendationModel):
    """logit = MLP([embeddings, dense])."""

    Options = LegacyOptions

    def __init__(
        self, collection: nn.Module, num_dense: int, options: LegacyOptions = LegacyOptions(), seed: int = 0
    ) -> None:
        super().__init__(collection, num_dense)
        self.use_dense = options.use_dense
        layers = LayerFactory(seed)
        inputs = sum(self.widths) + (num_dense if options.use_dense else 0)
        self.mlp = layers.mlp(inputs, options.hidden, options.dropout)
        self.out = layers.linear((inputs, *options.hidden)[-1], 1)

    def logits(self, pooled: Tensor, dense: Tensor, index: Tensor) -> Tensor:
        """Logits, one per sample."""
        inputs = torch.cat([pooled, dense], dim=1) if self.use_dense else pooled
        logits: Tensor = self.out(self.mlp(inputs, index)).squeeze(1)
        return logits
