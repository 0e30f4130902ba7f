"""Linear layers with ReLU on a card, in fewer passes over the activations than PyTorch's own."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from rowhaul.device import layer_kernels
from rowhaul.device.products import are_worth_parts, in_tf32, parts_of

_ROWS, _COLUMNS, _TURNS = 8, 128, 16  # of a block of activations
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor, *, in_parts: bool = True) -> Tensor:
    """Return ReLU(x · weightᵀ + bias); ``x`` may have more columns than ``weight``, of zeros.

    ``in_parts``: products may be made of three in TF32, where that is quicker.
    """
    if in_parts and are_worth_parts(x, weight):
        return linear_relu_in_parts(x, weight, bias)
    if x.shape[1] > weight.shape[1]:
        weight = pad(weight, (0, x.shape[1] - weight.shape[1]))
    out: Tensor = _LinearReLU.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch's apply has no types
    return out


def linear_relu_in_parts(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same, where each product of numbers is three of TF32."""
    with torch.cuda.device_of(x):  # Triton starts kernels on the thread's card
        out: Tensor = _LinearReLUInParts.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch's apply has no types
    return out


class _LinearReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = torch._addmm_activation(bias, x, weight.t())
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> Gradients:
        x, weight, out = ctx.saved_tensors
        passed, summed = _relu_backward(out, gradients.contiguous(), splits=False)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            passed @ weight if needs_x else None,
            passed.t() @ x if needs_weight else None,
            summed if needs_bias else None,
        )


class _LinearReLUInParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        parts = parts_of(x, high_first=True)
        factor = parts_of(weight, high_first=False, width=x.shape[1])
        with in_tf32():
            out = torch._addmm_activation(bias, parts, factor.t())
        ctx.save_for_backward(parts, weight, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> Gradients:
        parts, weight, out = ctx.saved_tensors
        inputs, outputs = parts.shape[1] // 3, len(weight)
        passed, summed = _relu_backward(out, gradients.contiguous(), splits=True)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        of_x = of_weight = None
        with in_tf32():
            if needs_x:
                of_x = passed @ parts_of(weight, high_first=True, width=inputs, above=True)
            if needs_weight:
                # Each sample's three parts are three rows here: sums go over all of them.
                of_weight = passed.view(-1, outputs).t() @ parts.view(-1, inputs)
                of_weight = of_weight[:, : weight.shape[1]]
        return of_x, of_weight, summed if needs_bias else None


def _relu_backward(outputs: Tensor, gradients: Tensor, *, splits: bool) -> tuple[Tensor, Tensor]:
    """Gradients of what ReLU was given, perhaps in parts, and their sums over samples."""
    num_rows, width = outputs.shape
    found = outputs.new_empty(num_rows, 3 * width if splits else width)
    if not num_rows:
        return found, gradients.sum(0)
    grid = triton.cdiv(num_rows, _ROWS * _TURNS), triton.cdiv(width, _COLUMNS)
    partial = outputs.new_empty(grid[0], width)
    layer_kernels.relu_backward[grid](
        outputs, gradients, found, partial, num_rows, width,
        SPLITS=splits, ROWS=_ROWS, COLUMNS=_COLUMNS, TURNS=_TURNS,
    )  # fmt: skip
    return found, partial.sum(0)
