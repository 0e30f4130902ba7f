"""Dot products of a sample's vectors on a CPU, without the square matrix of all of them."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rowhaul._dots import join_dots, part_gradients
from rowhaul.nn.pooled import is_worth_threads
from rowhaul.nn.threads import run_all


def joined_dots(first: Tensor | None, others: Tensor, num_vectors: int) -> Tensor:
    """Join a sample's first vector, if any, and the dot products of every two of its vectors.

    Args:
        first: samples x dim.
        others: the other vectors of each sample, side by side; of the same type.
        num_vectors: of a sample, the first included.
    """
    joined: Tensor = _JoinedDots.apply(first, others, num_vectors)  # type: ignore[no-untyped-call]  # torch's apply has no types
    return joined


class _JoinedDots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor | None, others: Tensor, num_vectors: int) -> Tensor:
        others = others.contiguous()
        ctx.has_first, ctx.dim = first is not None, others.shape[1] // (num_vectors - (first is not None))
        first = others.new_empty(len(others), 0) if first is None else first.contiguous()
        ctx.save_for_backward(first, others)
        out = others.new_empty(len(others), first.shape[1] + num_vectors * (num_vectors - 1) // 2)
        _run(lambda first, others, out: join_dots(first, others, ctx.dim, out), first, others, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        first, others = ctx.saved_tensors
        first_gradients, other_gradients = torch.empty_like(first), torch.empty_like(others)
        _run(
            lambda gradients, first, others, *out: part_gradients(gradients, first, others, ctx.dim, *out),
            *(gradients.contiguous(), first, others, first_gradients, other_gradients),
        )
        return first_gradients if ctx.has_first else None, other_gradients, None


def _run(function: Any, *tensors: Tensor) -> None:
    """Call ``function`` with the samples of some tensors, in as many parts as there are threads."""
    arrays = [tensor.detach().numpy() for tensor in tensors]
    in_parallel = is_worth_threads(sum(array.size for array in arrays))
    num_parts = torch.get_num_threads() if in_parallel else 1
    bounds = np.linspace(0, len(arrays[0]), num_parts + 1).astype(int)
    parts = [partial(function, *(array[begin:end] for array in arrays)) for begin, end in pairwise(bounds)]
    run_all(parts, in_parallel)
