"""DLRM (Naumov et al., 2019): dot products between embeddings and a dense vector, then an MLP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from rowhaul.errors import ConfigError
from rowhaul.nn.layers import LayerFactory, PairwiseDots
from rowhaul.nn.models.base import RecommendationModel, check_dropout, checked_sizes


@dataclass(frozen=True)
class DLRMOptions:
    """Options of `DLRM`.

    Args:
        bottom: hidden layers between the dense columns and their vector, whose size is the embeddings'.
        top: hidden layers between the interactions and the logit.
        dropout: probability of dropping an output of a hidden layer of the top in training.
    """

    bottom: tuple[int, ...] = (256, 64)
    top: tuple[int, ...] = (256, 128)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "bottom", checked_sizes("bottom", self.bottom))
        object.__setattr__(self, "top", checked_sizes("top", self.top))
        check_dropout(self.dropout)


class DLRM(RecommendationModel):
    """logit = top([z, ⟨v_i, v_j⟩ for i > j]), z = bottom(dense), v = (z, embeddings).

    Without dense columns there is no z.
    """

    Options = DLRMOptions

    def __init__(
        self, collection: nn.Module, num_dense: int, options: DLRMOptions = DLRMOptions(), seed: int = 0
    ) -> None:
        super().__init__(collection, num_dense)
        layers = LayerFactory(seed)
        self.embedding_dim = self.common_width()
        self.bottom = layers.mlp(num_dense, (*options.bottom, self.embedding_dim)) if num_dense else None
        self.dots = PairwiseDots(len(self.features) + (num_dense > 0))
        if not self.dots.num_pairs:
            raise ConfigError(
                "DLRM needs two vectors to multiply: a second id feature or dense columns; with one id "
                "feature alone take wide_deep, deepfm or dcn (--model)"
            )
        inputs = self.dots.num_pairs + (self.embedding_dim if num_dense else 0)
        self.top = layers.mlp(inputs, options.top, options.dropout)
        self.out = layers.linear((inputs, *options.top)[-1], 1)

    def logits(self, pooled: Tensor, dense: Tensor, index: Tensor) -> Tensor:
        """Logits, one per sample."""
        bottom = None if self.bottom is None else self.bottom(dense, index)
        interactions = self.dots.joined(bottom, pooled, pads=self.top.fuses and len(self.top.linears) > 0)
        logits: Tensor = self.out(self.top(interactions, index)).squeeze(1)
        return logits
