"""Weighted sums of experts' outputs on a CPU, without copies of all outputs for every sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rowhaul._mixtures import mix, unmix
from rowhaul.nn.pooled import is_worth_threads
from rowhaul.nn.threads import run_all


def mixtures(
    members: Sequence[Sequence[int]], weights: Tensor, experts: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Sum experts' outputs, several times: samples x outputs for each list of ``members``.

    Args:
        members: numbers of the experts that each sum is of.
        weights: samples x members of all sums, one sum after the other.
        experts: samples x outputs of each; of the weights' type.
    """
    sums: tuple[Tensor, ...] = _Mixtures.apply(members, weights, *experts)  # type: ignore[no-untyped-call]  # torch's apply has no types
    return sums


class _Mixtures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, members: Sequence[Sequence[int]], weights: Tensor, *experts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.members = members
        factors, *outputs = (one.contiguous() for one in (weights, *experts))
        ctx.save_for_backward(factors, *outputs)
        sums = tuple(torch.empty_like(outputs[0]) for _ in members)
        _run(mix, members, factors, outputs, sums)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        factors, *outputs = ctx.saved_tensors
        of_sums = [one.contiguous() for one in gradients]
        of_factors, of_outputs = torch.empty_like(factors), [torch.empty_like(one) for one in outputs]
        unmix_into = partial(unmix, of_factors.numpy())
        _run(unmix_into, ctx.members, factors, outputs, of_sums, of_outputs)
        return None, of_factors, *of_outputs


def _run(
    function: Callable[..., None],
    members: Sequence[Sequence[int]],
    weights: Tensor,
    *by_address: Sequence[Tensor],
) -> None:
    """Call a kernel, for as many parts of the samples as there are threads."""
    ends = np.cumsum([0, *map(len, members)])
    flat = np.array([one for some in members for one in some], dtype=np.int64)
    addresses = [np.array([one.data_ptr() for one in some], dtype=np.int64) for some in by_address]
    output = by_address[0][0]
    in_parallel = is_worth_threads(output.numel() * len(flat))
    bounds = np.linspace(0, len(weights), (torch.get_num_threads() if in_parallel else 1) + 1).astype(int)
    given = (flat, ends, weights.detach().numpy(), output.shape[1], *addresses)
    run_all([partial(function, begin, end, *given) for begin, end in pairwise(bounds)], in_parallel)
