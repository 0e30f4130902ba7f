"""The loss of each sample, as models learn from it by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rowhaul.errors import DataError
from rowhaul.nn.batch import Batch

Losses = Callable[[Tensor, Batch], Tensor]
"""Makes one loss per sample of logits and a batch with labels."""


@runtime_checkable
class ScaledLosses(Protocol):
    """Losses that multiply those of the first label, so that what a model adds to them has to be, too."""

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return one loss per sample."""

    def scale(self, batch: Batch) -> float:
        """What the loss of the first label is multiplied by, besides the weights of samples."""


def scale_of(losses: Losses, batch: Batch) -> float:
    """What these losses multiply that of the first label by."""
    return losses.scale(batch) if isinstance(losses, ScaledLosses) else 1.0


def as_columns(values: Tensor, num_samples: int) -> Tensor:
    """Labels or logits as samples x tasks, where there is one task or no sample, too."""
    if num_samples:
        return values.reshape(num_samples, -1)
    return values.reshape(0, values.shape[1] if values.dim() > 1 else 1)


def labels_of(batch: Batch) -> Tensor:
    """Return the labels of a batch that is learned from.

    Raises:
        DataError: it has none.
    """
    if batch.labels is None:
        raise DataError(
            "training needs labels, and this batch has none; read the stream with require_label=True, or "
            "give Batch(..., labels=...)"
        )
    return batch.labels


def per_sample_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross entropy of each sample; of several labels the sum over those that are not missing."""
    labels = labels_of(batch).to(logits.dtype)
    if labels.dim() == 1:
        return binary_cross_entropy_with_logits(logits, labels, reduction="none")
    logits = logits.reshape(labels.shape)
    known = ~torch.isnan(labels)
    losses = binary_cross_entropy_with_logits(logits, torch.where(known, labels, 0.0), reduction="none")
    return torch.where(known, losses, 0.0).sum(1)
