"""FinalMLP (Mao et al., 2023): two MLPs over gated inputs, joined by a bilinear product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rowhaul._nearest import did_you_mean
from rowhaul.errors import ConfigError
from rowhaul.nn.layers import MLP, LayerFactory
from rowhaul.nn.models.base import MLPOptions, RecommendationModel, checked_names, checked_sizes


@dataclass(frozen=True)
class FinalMLPOptions(MLPOptions):
    """Options of `FinalMLP`.

    Args:
        second: sizes of the second MLP's hidden layers; empty: as the first's, ``hidden``.
        num_heads: parts into which the outputs of both are cut for the bilinear product.
        gate: sizes of the hidden layers of the gates.
        first_context: names of the features that the first MLP's gate reads; empty: a learned vector.
        second_context: the same for the second's.
    """

    second: tuple[int, ...] = ()
    num_heads: int = 4
    gate: tuple[int, ...] = (64,)
    first_context: tuple[str, ...] = ()
    second_context: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("second", "gate"):
            object.__setattr__(self, name, checked_sizes(name, getattr(self, name)))
        object.__setattr__(self, "second", self.second or self.hidden)
        for name in ("first_context", "second_context"):
            object.__setattr__(self, name, checked_names(name, getattr(self, name)))
        heads = self.num_heads
        if not isinstance(heads, int) or heads < 1:
            raise ConfigError(f"num_heads must be at least 1, got {heads!r}")
        if not self.hidden:
            raise ConfigError(
                "FinalMLP needs hidden layers: their last outputs are multiplied; got hidden []"
            )
        if self.hidden[-1] % heads or self.second[-1] % heads:
            raise ConfigError(
                f"num_heads is {heads}, which must divide the last sizes of both MLPs, {self.hidden[-1]} and "
                f"{self.second[-1]}"
            )


class FinalMLP(RecommendationModel):
    """logit = b + w₁ · o₁ + w₂ · o₂ + Σ_h o₁ₕᵀ W_h o₂ₕ, oₛ = MLPₛ(2 sigmoid(gateₛ(contextₛ)) ⊙ x).

    x = [embeddings, dense]; oₛₕ is the h-th of equal parts of oₛ.
    """

    Options = FinalMLPOptions

    def __init__(
        self,
        collection: nn.Module,
        num_dense: int,
        options: FinalMLPOptions = FinalMLPOptions(),
        seed: int = 0,
    ) -> None:
        super().__init__(collection, num_dense)
        layers = LayerFactory(seed)
        inputs = sum(self.widths) + num_dense
        first, second = options.hidden[-1], options.second[-1]
        self.num_heads = options.num_heads
        self.first_gate = _Gate(self, layers, options.first_context, inputs, options.gate)
        self.second_gate = _Gate(self, layers, options.second_context, inputs, options.gate)
        self.first = layers.mlp(inputs, options.hidden, options.dropout)
        self.second = layers.mlp(inputs, options.second, options.dropout)
        self.first_out = layers.linear(first, 1)
        self.second_out = layers.linear(second, 1, bias=False)
        # heads · part of the first x part of the second
        self.product = layers.weight(first, second // options.num_heads)

    def logits(self, pooled: Tensor, dense: Tensor, index: Tensor) -> Tensor:
        """Logits, one per sample."""
        inputs = torch.cat([pooled, dense], dim=1)
        first = self.first(inputs * self.first_gate(pooled), index)
        second = self.second(inputs * self.second_gate(pooled), index)
        heads, part = self.num_heads, self.product.shape[1]
        samples = inputs.shape[0]  # not len(): it would fix the size of exported graphs
        left = first.reshape(samples, heads, first.shape[1] // heads).transpose(0, 1)
        weights = self.product.reshape(heads, first.shape[1] // heads, part)
        products = torch.bmm(left, weights).transpose(0, 1).reshape(samples, heads * part)  # o₁ₕᵀ W_h
        logits: Tensor = (self.first_out(first) + self.second_out(second)).squeeze(1)
        logits = logits + (products * second).sum(1)
        return logits


class _Gate(nn.Module):
    """Weights from 0 to 2 for every input, from some features' embeddings or from a learned vector."""

    def __init__(
        self,
        model: RecommendationModel,
        layers: LayerFactory,
        context: Sequence[str],
        inputs: int,
        hidden: Sequence[int],
    ) -> None:
        super().__init__()
        for name in context:
            if name not in model.features:
                near, known = did_you_mean(name, model.features), ", ".join(model.features)
                raise ConfigError(f"no id feature {name!r} for a gate{near}; the id features are {known}")
        self.sizes = list(model.widths)
        self.places = [model.features.index(name) for name in context]
        width = sum(self.sizes[place] for place in self.places) or max(self.sizes)
        self.constant = None if context else layers.weight(1, width)
        self.mlp: MLP = layers.mlp(width, hidden)
        self.out = layers.linear((width, *hidden)[-1], inputs)

    def forward(self, pooled: Tensor) -> Tensor:
        """Weights of samples x inputs; of 1 x inputs where they are the same for all."""
        context: Tensor | None = self.constant
        if context is None:
            parts = torch.split_with_sizes(pooled, self.sizes, dim=1)
            context = torch.cat([parts[place] for place in self.places], dim=1)
        return 2 * torch.sigmoid(self.out(self.mlp(context, context)))  # without dropout no index is read
