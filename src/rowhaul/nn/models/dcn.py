"""Deep & Cross (Wang et al., 2017, 2021): explicit feature crosses beside an MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rowhaul.errors import ConfigError
from rowhaul.nn.layers import LayerFactory
from rowhaul.nn.models.base import MLPOptions, RecommendationModel

CROSSES = ("vector", "matrix")


@dataclass(frozen=True)
class DeepAndCrossOptions(MLPOptions):
    """Options of `DeepAndCross`.

    Args:
        num_cross: cross layers; n of them give crosses of up to n + 1 inputs.
        cross: ``"vector"``, one weight per input and layer (2017), or ``"matrix"``, the stronger
            and dearer cross of "DCN v2" (2021).
    """

    num_cross: int = 3
    cross: str = "vector"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.num_cross, int) or self.num_cross < 0:
            raise ConfigError(f"num_cross must be a number of layers, 0 or more, got {self.num_cross!r}")
        if self.cross not in CROSSES:
            raise ConfigError(f"cross must be one of {', '.join(CROSSES)}, got {self.cross!r}")


class DeepAndCross(RecommendationModel):
    """logit = w · [x_L, MLP(x_0)], x_0 = [embeddings, dense], x_{l+1} = x_0 (w_l · x_l) + b_l + x_l.

    With the matrix cross x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l.
    """

    Options = DeepAndCrossOptions

    def __init__(
        self,
        collection: nn.Module,
        num_dense: int,
        options: DeepAndCrossOptions = DeepAndCrossOptions(),
        seed: int = 0,
    ) -> None:
        super().__init__(collection, num_dense)
        layers = LayerFactory(seed)
        inputs = sum(self.widths) + num_dense
        outputs = 1 if options.cross == "vector" else inputs
        self.cross = options.cross
        self.cross_weights = nn.ParameterList(
            layers.weight(outputs, inputs) for _ in range(options.num_cross)
        )
        self.cross_biases = nn.ParameterList(torch.zeros(inputs) for _ in range(options.num_cross))
        self.deep = layers.mlp(inputs, options.hidden, options.dropout)
        self.out = layers.linear(inputs + (inputs, *options.hidden)[-1], 1)

    def logits(self, pooled: Tensor, dense: Tensor, index: Tensor) -> Tensor:
        """Logits, one per sample."""
        inputs = torch.cat([pooled, dense], dim=1)
        deep = self.deep(inputs, index)
        logits: Tensor = self.out(torch.cat([self._crossed(inputs), deep], dim=1)).squeeze(1)
        return logits

    def _crossed(self, inputs: Tensor) -> Tensor:
        crossed = inputs
        for weight, bias in zip(self.cross_weights, self.cross_biases, strict=True):
            if self.cross == "vector":
                crossed = torch.addcmul(crossed + bias, inputs, crossed @ weight.T)
            else:
                crossed = torch.addcmul(crossed, inputs, nn.functional.linear(crossed, weight, bias))
        return crossed
