"""DeepFM (Guo et al., 2017): a factorisation machine and an MLP over the same embeddings."""

from __future__ import annotations

from torch import Tensor, nn

from rowhaul.nn.models.base import MLPOptions
from rowhaul.nn.models.wide_deep import WideAndDeep


class DeepFMOptions(MLPOptions):
    """Options of `DeepFM`."""


class DeepFM(WideAndDeep):
    """logit = Σ linear weight of the ids + w · dense + Σ_{i<j} ⟨v_i, v_j⟩ + MLP([v_1 … v_F, dense]).

    That is Wide & Deep with the products of all pairs of embeddings.
    """

    Options = DeepFMOptions

    def __init__(
        self,
        collection: nn.Module,
        num_dense: int,
        options: DeepFMOptions = DeepFMOptions(),
        seed: int = 0,
    ) -> None:
        super().__init__(collection, num_dense, options, seed)
        self.embedding_dim = self.common_width() - 1

    def logits(self, pooled: Tensor, dense: Tensor, index: Tensor) -> Tensor:
        """Logits, one per sample."""
        logits, embeddings = self.wide_and_deep(pooled, dense, index)
        return logits + self._second_order(embeddings)

    def _second_order(self, embeddings: Tensor) -> Tensor:
        """Σ_{i<j} ⟨v_i, v_j⟩ = (‖Σ v_i‖² − Σ ‖v_i‖²) / 2, in time linear in the features."""
        total = embeddings.view(embeddings.shape[0], len(self.features), self.embedding_dim).sum(1)
        return (total.square().sum(1) - embeddings.square().sum(1)) / 2
