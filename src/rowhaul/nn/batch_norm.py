"""Batch normalisation over the global batch, however its samples are spread over workers.

``torch.nn.BatchNorm1d`` normalises by the samples at hand, so its result depends on how a batch was dealt
out. Here the sums behind mean and variance, and behind their gradients, go over all workers: three small
sums a layer and step. Mean first, then squared deviations from it: sums of squares would cancel where
a mean is large. Sums are in float64 whatever the input's type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rowhaul.errors import ConfigError, DataError

# Sums a one-dimensional tensor over the workers, in rank order, in place.
Reducer = Callable[[Tensor], None]


class BatchNorm1d(nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d``, arguments and all, on the global batch of several workers.

    By itself it is torch's. Once it has a ``reducer``, every forward in training, and every backward, sums
    over the workers: all of them must run it, those with no sample too. Gradients of ``weight`` and ``bias``
    are this worker's part, to be summed with the other dense gradients. Running statistics are the
    same bits on all workers. Copies and pickles leave the reducer behind.

    Example:
        >>> norm = BatchNorm1d(64)
        >>> norm.reducer = collective.sum_in_rank_order  # `DistributedTraining` does this
        >>> hidden = norm(hidden)  # samples x 64, or samples x 64 x places
    """

    # Of the class, so that torch's own layers, turned into these, have it too.
    reducer: Reducer | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the global batch in training, by the running statistics in evaluation."""
        if self.reducer is None or (not self.training and self.running_mean is not None):
            return super().forward(input)
        if not self.training:
            raise ConfigError(
                "BatchNorm1d(track_running_stats=False) in evaluation normalises by the samples at hand, and "
                "each worker has others; use track_running_stats=True"
            )
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise ConfigError(
                f"BatchNorm1d({self.num_features}) got an input of shape {tuple(input.shape)}, which has "
                f"{input.shape[1]} features; build it with that number"
            )
        # torch's Function.apply has no types.
        output, mean, variance, count = _NormaliseGlobally.apply(  # type: ignore[no-untyped-call]  # torch's apply has no types
            input, self.weight, self.bias, self.eps, self.reducer
        )
        self._track(mean, variance, count)
        normalised: Tensor = output
        return normalised

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Move the running statistics towards those of the batch, as torch does."""
        if not self.track_running_stats or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        if count == 0:
            return
        part = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        for running, current in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.copy_(running.double().lerp(current, part))

    def __getstate__(self) -> dict[str, Any]:
        # A reducer holds this rank's connections: nothing to copy or to write to a file.
        return {name: value for name, value in self.__dict__.items() if name != "reducer"}


class _NormaliseGlobally(torch.autograd.Function):
    """Forward and backward of training, with sums over the workers in both."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, reducer: Reducer
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        axes, shape = _other_axes(x), _broadcast_shape(x)
        size = x.new_tensor([x.shape[0] * math.prod(x.shape[2:])], dtype=torch.float64)
        totals = torch.cat([size, x.sum(axes, dtype=torch.float64)])
        reducer(totals)
        count = int(totals[0])
        if count == 1:  # all workers see it: none is left waiting for the others
            raise DataError(
                "batch normalisation in training needs at least 2 samples in the global batch, got 1; "
                "use a larger batch, or drop the last short one"
            )
        mean = totals[1:] / max(count, 1)
        centre = mean.to(_working_dtype(x))  # differences are taken from this rounded mean
        deviations = x - centre.view(shape)
        squares = deviations.square().sum(axes, dtype=torch.float64)
        reducer(squares)
        variance = (squares / max(count, 1) - (mean - centre).square()).clamp_min_(0)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, bias, centre, scale)
        ctx.count, ctx.reducer = count, reducer
        output = deviations.mul_(_times(scale, weight).to(centre.dtype).view(shape))
        if bias is not None:
            output.add_(bias.view(shape))
        ctx.mark_non_differentiable(mean, variance)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, centre, scale = ctx.saved_tensors
        axes, shape = _other_axes(x), _broadcast_shape(x)
        gradient = gradient.to(centre.dtype)
        normalised = (x - centre.view(shape)).mul_(scale.to(centre.dtype).view(shape))
        of_bias = gradient.sum(axes, dtype=torch.float64)
        of_weight = (gradient * normalised).sum(axes, dtype=torch.float64)
        of_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            totals = torch.cat([of_bias, of_weight])
            ctx.reducer(totals)
            means = (totals / max(ctx.count, 1)).to(centre.dtype).view(2, *shape)
            away = gradient - means[0] - normalised.mul_(means[1])
            of_x = away.mul_(_times(scale, weight).to(centre.dtype).view(shape)).to(x.dtype)
        return (
            of_x,
            None if weight is None else of_weight.to(weight.dtype),
            None if bias is None else of_bias.to(bias.dtype),
            None,
            None,
        )


def _other_axes(x: Tensor) -> list[int]:
    """All but that of the features: samples, and places if there are any."""
    return [0, *range(2, x.dim())]


def _broadcast_shape(x: Tensor) -> tuple[int, ...]:
    return (1, -1, *(1 for _ in x.shape[2:]))


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _times(scale: Tensor, weight: Tensor | None) -> Tensor:
    return scale if weight is None else scale * weight


def set_reducer(model: nn.Module, reducer: Reducer | None) -> None:
    """Make every `BatchNorm1d` of a model sum over the workers through ``reducer``; None: one process."""
    for module in model.modules():
        if isinstance(module, BatchNorm1d):
            module.reducer = reducer


def convert_batch_norm(model: nn.Module) -> nn.Module:
    """Turn every ``torch.nn.BatchNorm1d`` of a model into `BatchNorm1d`, in place; returns the model.

    The layers stay the same objects with the same parameters, statistics and hooks: an optimizer built
    before needs no change. Classes derived from torch's are left alone, as their forward is not known.
    """
    for module in model.modules():
        if type(module) is nn.BatchNorm1d:
            module.__class__ = BatchNorm1d
    return model
