"""Dot products of a sample's vectors on a card, without the square matrix of all of them."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from rowhaul.device import layer_kernels
from rowhaul.device.launch import columns_of
from rowhaul.device.products import allows_tf32

_MOST_VECTORS, _MOST_COLUMNS = 64, 128  # whose dot products one program holds
_LEAST = 16  # of a dimension, for products of matrices


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
    with torch.cuda.device_of(others):  # Triton starts kernels on the thread's card
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
        "PRECISION": "tf32" if allows_tf32() else precision,
        "num_warps": 2,
    }
