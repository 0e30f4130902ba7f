"""What is minimised: one loss per sample, over one label or several, each with a mask and a weight.

What is divided by is the same number on all ranks, counted over the global batch: so the losses of n
workers add up to the loss of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

from rowhaul._field_types import check_fields
from rowhaul._nearest import did_you_mean
from rowhaul.data.schema import Schema
from rowhaul.errors import ConfigError, DataError
from rowhaul.nn import Batch
from rowhaul.nn.batch import Totals
from rowhaul.nn.losses import as_columns, labels_of, per_sample_loss
from rowhaul.nn.models import RecommendationModel

DIVISORS = ("batch", "labels", "weights")
_LOSSES: dict[str, Callable[..., Tensor]] = {"binary": binary_cross_entropy_with_logits, "number": mse_loss}


@dataclass(frozen=True)
class LossConfig:
    """How the losses of labels become one; what a model adds for drawn negatives goes with its label's.

    Args:
        weights: what the loss of a label is multiplied by, by its name; 1 where it is not named.
        divide_by: ``batch``: the samples of the global batch; ``labels``: those that have the label;
            ``weights``: the sum of the weights of those.
    """

    weights: dict[str, Any] = field(default_factory=dict)
    divide_by: str = "batch"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.divide_by not in DIVISORS:
            known = ", ".join(DIVISORS)
            raise ConfigError(f"loss.divide_by must be one of {known}, got {self.divide_by!r}")
        for name, weight in self.weights.items():
            if (
                isinstance(weight, bool)
                or not isinstance(weight, int | float)
                or not 0 <= weight < float("inf")
            ):
                raise ConfigError(f"loss.weights: the weight of {name!r} must be 0 or more, got {weight!r}")


PLAIN_LOSS = LossConfig()


class TaskLosses:
    """The loss of each sample, for a schema and a model.

    Args:
        schema: says which labels there are.
        config: how they are put together.
        model: that learns them.
    """

    def __init__(self, schema: Schema, config: LossConfig, model: RecommendationModel) -> None:
        names = [column.name for column in schema.tasks]
        for name in config.weights:
            if name not in names:
                near, known = did_you_mean(name, names), ", ".join(names)
                raise ConfigError(f"loss.weights: no label {name!r}{near}; the schema has {known}")
        if config.divide_by == "weights" and not schema.weight:
            raise ConfigError("loss.divide_by is weights, but the schema names no `weight` column")
        if config.divide_by != "batch" and model.learns_from_all:
            raise ConfigError(
                f"loss.divide_by is {config.divide_by}, but {type(model).__name__} learns all labels from "
                "all samples; set it to batch"
            )
        # Where the schema names no label, a batch may still have one.
        self._kinds = [column.kind for column in schema.tasks] or ["binary"]
        self._scales = [float(config.weights.get(name, 1.0)) for name in names] or [1.0]
        self._divide_by, self._model = config.divide_by, model
        self._is_plain = not schema.labels and config == PLAIN_LOSS and not schema.weight

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return what `Batch.loss` takes."""
        given = labels_of(batch)
        if self._is_plain and self._kinds == ["binary"]:
            return per_sample_loss(logits, batch)
        labels = self._model.targets(as_columns(given, len(batch))).to(logits.dtype)
        logits = logits.reshape(labels.shape)
        total, batch = logits.new_zeros(len(batch)), self.counted(batch)
        for task, (kind, scale) in enumerate(zip(self._kinds, self._scales, strict=True)):
            known = ~torch.isnan(labels[:, task])
            filled = torch.where(known, labels[:, task], torch.zeros_like(labels[:, task]))
            losses = _LOSSES[kind](logits[:, task], filled, reduction="none")
            losses = torch.where(known, losses, torch.zeros_like(losses))
            total = total + losses * (scale * self._share(batch, task))
        return total if batch.weights is None else total * batch.weights.to(total.dtype)

    def scale(self, batch: Batch) -> float:
        """What the loss of the first label is multiplied by, besides the weights of samples."""
        return self._scales[0] * self._share(self.counted(batch), 0)

    def counted(self, batch: Batch) -> Batch:
        """Count what the loss is divided by, in a whole batch made by hand; a reader's says it.

        Raises:
            DataError: for a part of a batch that does not say it.
        """
        if self._divide_by == "batch" or batch.totals is not None or batch.labels is None:
            return batch
        if self._divide_by == "labels" and batch.labels.dim() == 1 and batch.weights is None:
            return batch  # every sample has its one label, so readers do not count
        if batch.global_size != len(batch):
            raise DataError(
                f"loss.divide_by is {self._divide_by}, counted over the global batch, but a part with "
                f"{len(batch):,} of its {batch.global_size:,} samples has no totals; give it those of the "
                "whole (rowhaul.nn.batch.Totals), or set loss.divide_by to batch"
            )
        known = ~torch.isnan(as_columns(batch.labels, len(batch)))
        weights = torch.ones_like(known[:, 0]) if batch.weights is None else batch.weights
        weights = weights.to(torch.float64)
        weighted = (known * weights.unsqueeze(1)).sum(0)
        labelled = tuple(map(float, known.sum(0).tolist()))
        return replace(batch, totals=Totals(weights.sum().item(), labelled, tuple(weighted.tolist())))

    def _share(self, batch: Batch, task: int) -> float:
        """What turns a mean over the global batch into one over fewer samples, or over weights."""
        if self._divide_by == "batch" or batch.totals is None:
            return 1.0
        by_task = batch.totals.labelled if self._divide_by == "labels" else batch.totals.weighted
        return batch.global_size / by_task[task] if by_task[task] else 0.0
