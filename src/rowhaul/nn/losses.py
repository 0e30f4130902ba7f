"""The loss of each sample, as models learn from it by default."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from rowhaul.nn.batch import Batch

Losses = Callable[[Tensor, Batch], Tensor]
"""Makes one loss per sample of logits and a batch with labels."""


def per_sample_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross entropy of each sample; of several labels the sum over those that are not missing."""
    assert batch.labels is not None
    labels = batch.labels.to(logits.dtype)
    if labels.dim() == 1:
        return binary_cross_entropy_with_logits(logits, labels, reduction="none")
    logits = logits.reshape(labels.shape)
    known = ~torch.isnan(labels)
    losses = binary_cross_entropy_with_logits(logits, torch.where(known, labels, 0.0), reduction="none")
    return torch.where(known, losses, 0.0).sum(1)
