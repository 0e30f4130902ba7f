"""Dense layers on a card, in fewer passes over the activations than PyTorch's own."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from rowhaul.device import layer_kernels
from rowhaul.device.launch import columns_of

_MOST_VECTORS, _MOST_COLUMNS = 64, 128  # whose dot products one program holds
_LEAST = 16  # of a dimension, for products of matrices
_ROWS, _COLUMNS, _TURNS = 8, 128, 16  # of a block of activations


def joined_dots(first: Tensor | None, others: Tensor, num_vectors: int, *, pads: bool) -> Tensor | None:
    """Join a sample's first vector, if any, and the dot products of every two of its vectors.

    Args:
        first: samples x dim.
        others: the other vectors of each sample, side by side.
        num_vectors: of a sample, the first included.
        pads: whether columns of zeros may follow.

    Returns:
        None if these are too many or too long.
    """
    dim = others.shape[1] // (num_vectors - (first is not None))
    if num_vectors > _MOST_VECTORS or dim > _MOST_COLUMNS:
        return None
    joined: Tensor = _JoinedDots.apply(first, others, num_vectors, dim, pads)  # type: ignore[no-untyped-call]  # torch's apply has no types
    return joined


class _JoinedDots(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, first: Tensor | None, others: Tensor, num_vectors: int, dim: int, pads: bool
    ) -> Tensor:
        ctx.has_first, ctx.num_vectors, ctx.dim = first is not None, num_vectors, dim
        others = others.contiguous()
        first = others if first is None else first.contiguous()
        ctx.save_for_backward(first, others)
        width = num_vectors * (num_vectors - 1) // 2 + dim * ctx.has_first
        if pads:
            width = triton.cdiv(width, layer_kernels.PAD.value) * layer_kernels.PAD.value
        out = others.new_empty(len(others), width)
        if len(others):
            layer_kernels.join_dots[(len(others),)](
                first, others, out, first.stride(0), others.stride(0), width, num_vectors,
                **_options(ctx, "tf32x3"),
            )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        first, others = ctx.saved_tensors
        gradients = gradients.contiguous()
        found = torch.empty_like(others)
        first_found = others.new_empty(len(others), ctx.dim) if ctx.has_first else None
        if len(others):
            layer_kernels.join_dots_backward[(len(others),)](
                first, others, gradients, found if first_found is None else first_found, found,
                first.stride(0), others.stride(0), gradients.shape[1], ctx.num_vectors,
                **_options(ctx, "ieee" if ctx.dim <= _LEAST else "tf32x3"),
            )  # fmt: skip
        return first_found, found, None, None, None


def _options(ctx: Any, precision: str) -> dict[str, Any]:
    """``precision`` of products in float32: three products of TF32 are about as exact, and often quicker."""
    return {
        "DIM": ctx.dim,
        "COLUMNS": max(_LEAST, columns_of(ctx.dim)),
        "ROWS": max(_LEAST, columns_of(ctx.num_vectors)),
        "HAS_FIRST": ctx.has_first,
        "PRECISION": "tf32" if _allows_tf32() else precision,
        "num_warps": 2,
    }


def _allows_tf32() -> bool:
    """Whether PyTorch may multiply matrices of float32 as TF32; it has two names for that."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ReLU(x · weightᵀ + bias); ``x`` may have more columns than ``weight``, of zeros."""
    if x.shape[1] > weight.shape[1]:
        weight = pad(weight, (0, x.shape[1] - weight.shape[1]))
    out: Tensor = _LinearReLU.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch's apply has no types
    return out


class _LinearReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = torch._addmm_activation(bias, x, weight.t())
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight, out = ctx.saved_tensors
        passed, summed = _relu_backward(out, gradients.contiguous())
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            passed @ weight if needs_x else None,
            passed.t() @ x if needs_weight else None,
            summed if needs_bias else None,
        )


def _relu_backward(outputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of what ReLU was given, and their sums over samples."""
    num_rows, width = outputs.shape
    if not num_rows:
        return gradients, gradients.sum(0)
    found = torch.empty_like(outputs)
    grid = triton.cdiv(num_rows, _ROWS * _TURNS), triton.cdiv(width, _COLUMNS)
    partial = outputs.new_empty(grid[0], width)
    layer_kernels.relu_backward[grid](
        outputs, gradients, found, partial, num_rows, width, ROWS=_ROWS, COLUMNS=_COLUMNS, TURNS=_TURNS
    )
    return found, partial.sum(0)
