"""DCN-v2 (Wang et al., 2021): cross layers with a full or low-rank matrix, before an MLP or beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rowhaul.errors import ConfigError
from rowhaul.nn.layers import LayerFactory
from rowhaul.nn.models.base import MLPOptions, RecommendationModel

STRUCTURES = ("stacked", "parallel")


@dataclass(frozen=True)
class DCNv2Options(MLPOptions):
    """Options of `DCNv2`.

    Args:
        num_cross: cross layers; n of them give crosses of up to n + 1 inputs.
        structure: ``"stacked"``, the MLP reads the crosses, or ``"parallel"``, it reads the inputs.
        rank: of the matrices of cross layers; 0: full.
    """

    num_cross: int = 3
    structure: str = "stacked"
    rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_cross", "rank"):
            given = getattr(self, name)
            if not isinstance(given, int) or given < 0:
                raise ConfigError(f"{name} must be a whole number, 0 or more, got {given!r}")
        if self.structure not in STRUCTURES:
            raise ConfigError(f"structure must be one of {', '.join(STRUCTURES)}, got {self.structure!r}")


class DCNv2(RecommendationModel):
    """x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l, x_0 = [embeddings, dense].

    Stacked: logit = w · MLP(x_L). Parallel: logit = w · [x_L, MLP(x_0)]. Of low rank, W_l = U_l V_l.
    ``fuses``: gradients of matrices of full rank are made with fewer passes.
    """

    Options = DCNv2Options
    fuses = True

    def __init__(
        self, collection: nn.Module, num_dense: int, options: DCNv2Options = DCNv2Options(), seed: int = 0
    ) -> None:
        super().__init__(collection, num_dense)
        layers = LayerFactory(seed)
        inputs = sum(self.widths) + num_dense
        self.is_stacked = options.structure == "stacked"
        self.narrow = nn.ModuleList(  # V, where the rank is low
            layers.linear(inputs, options.rank, bias=False)
            for _ in range(options.num_cross if options.rank else 0)
        )
        self.cross = nn.ModuleList(
            layers.linear(options.rank or inputs, inputs) for _ in range(options.num_cross)
        )
        self.deep = layers.mlp(inputs, options.hidden, options.dropout)
        outputs = (inputs, *options.hidden)[-1]
        self.out = layers.linear(outputs if self.is_stacked else inputs + outputs, 1)

    def logits(self, pooled: Tensor, dense: Tensor, index: Tensor) -> Tensor:
        """Logits, one per sample."""
        inputs = torch.cat([pooled, dense], dim=1)
        crossed = self._crossed(inputs)
        if self.is_stacked:
            joined = self.deep(crossed, index)
        else:
            joined = torch.cat([crossed, self.deep(inputs, index)], dim=1)
        logits: Tensor = self.out(joined).squeeze(1)
        return logits

    def _crossed(self, inputs: Tensor) -> Tensor:
        if self.fuses and self.cross and not self.narrow and not _is_traced(inputs):
            layers = [one for cross in self.cross for one in (cross.weight, cross.bias)]
            crossed: Tensor = _Crosses.apply(inputs, *layers)  # type: ignore[no-untyped-call]  # torch's apply has no types
            return crossed
        crossed = inputs
        for position, cross in enumerate(self.cross):
            narrowed = self.narrow[position](crossed) if self.narrow else crossed
            crossed = torch.addcmul(crossed, inputs, cross(narrowed))
        return crossed


def _is_traced(inputs: Tensor) -> bool:
    """Whether something else than these operations is to be made of them."""
    return torch.compiler.is_compiling() or torch.is_autocast_enabled(inputs.device.type)


class _Crosses(torch.autograd.Function):
    """All cross layers, from x_0 and the weight and the bias of each.

    PyTorch's own gradient makes each product twice, and adds up in passes of their own what is added here as
    it is made.
    """

    @staticmethod
    def forward(ctx: Any, x_0: Tensor, *layers: Tensor) -> Tensor:
        x, states = x_0, []
        for weight, bias in zip(layers[::2], layers[1::2], strict=True):
            y = torch.addmm(bias, x, weight.t())
            states += [x, y]
            x = torch.addcmul(x, x_0, y)
        ctx.save_for_backward(x_0, *layers[::2], *states)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, ...]:
        x_0, *saved = ctx.saved_tensors
        count = len(saved) // 3
        weights, xs, ys = saved[:count], saved[count::2], saved[count + 1 :: 2]
        of_x_0, of_layers = torch.zeros_like(x_0), []
        for weight, x, y in reversed(list(zip(weights, xs, ys, strict=True))):
            of_y = gradients * x_0
            of_x_0.addcmul_(gradients, y)
            of_layers += [of_y.sum(0), of_y.t() @ x]  # from the last layer's bias to the first one's weight
            gradients = torch.addmm(gradients, of_y, weight)
        return of_x_0.add_(gradients), *reversed(of_layers)
