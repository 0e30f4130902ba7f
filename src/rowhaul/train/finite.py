"""Find gradients that are not finite before any step uses them, and name where they come from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rowhaul._finite import is_finite
from rowhaul.errors import RowhaulError
from rowhaul.nn import Batch
from rowhaul.nn.row_source import RowGradients

ADVICE = (
    "training has diverged, or the data has extreme values there. Lower the learning rates (rows.lr, "
    "dense.lr) in a new run, or correct the data. No checkpoint contains this step"
)


class DivergedError(RowhaulError):
    """A loss or a gradient is not finite."""


def check_step(
    step: int,
    model: nn.Module,
    parameters: Iterable[Tensor],
    batches: Iterable[Batch],
    loss: Tensor,
    rows: Sequence[RowGradients],
) -> None:
    """Before a step in one process: raise an error if the loss or any gradient is not finite.

    Args:
        step: counted from 1.
        model: names the parameters.
        parameters: of the model; collecting them takes as long as the check.
        batches: that were trained.
        loss: of all of them.
        rows: the gradients of rows.
    """
    gradients = [one.grad for one in parameters if one.grad is not None]
    if loss.is_cuda and math.isfinite(_sum_of_all([loss, *gradients, *(one.values for one in rows)])):
        return
    if math.isfinite(loss) and all(is_finite(one.values) for one in rows) and all(map(is_finite, gradients)):
        return
    found = describe(f"at step {step:,}", model, batches, loss, rows)
    raise DivergedError(f"{found}: {ADVICE}")


def _sum_of_all(tensors: Sequence[Any]) -> Tensor:
    """Add everything up on the card: to ask once is quicker than to ask for each."""
    there = tensors[0].device
    sums = [torch.as_tensor(one).sum(dtype=torch.float64).to(there) for one in tensors]
    return torch.stack(sums).sum()


def describe(
    when: str, model: nn.Module, batches: Iterable[Batch], loss: Tensor | None, rows: Iterable[RowGradients]
) -> str:
    """Name the sample whose loss is not finite; otherwise the row, or the parameter, whose gradient is not.

    Empty if all are finite. A row says more than a parameter: only a few samples have read it.
    """
    for batch in batches:
        for losses in batch.losses:
            if not is_finite(losses):
                place = int(torch.nonzero(~torch.isfinite(losses))[0])
                found, index = float(losses[place].detach()), int(batch.index[place])
                return f"the loss is {found} {when} in sample {index:,}, counted from 0"
    if loss is not None and not is_finite(loss):
        return f"the loss is {float(loss.detach())} {when}"
    for one in rows:
        if not is_finite(one.values):
            place = int(torch.nonzero(~torch.isfinite(torch.as_tensor(one.values)).all(dim=1))[0])
            return f"the gradient of row {one.keys[place]} of table {one.table(place)!r} is not finite {when}"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not is_finite(parameter.grad):
            return f"the gradient of {name} is not finite {when}"
    return ""
