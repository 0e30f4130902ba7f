"""Metrics of click probabilities: AUC, log loss, normalised entropy, accuracy, calibration.

All take labels of 0 and 1 and logits (the score before the sigmoid), so that a confident prediction
does not round to a probability of exactly 0 or 1. A value that is not defined, such as the AUC of
samples of one class, is NaN: a metric never ends a training run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rowhaul.errors import DataError
from rowhaul.nn.key_counts import KeyCounts

Labels = npt.NDArray[Any]  # 0 and 1, of any type
Logits = npt.NDArray[np.floating[Any]]

_BLOCK = 1 << 20  # samples turned into float64 at a time


@dataclass(frozen=True)
class MetricValues:
    """Metrics over ``num_samples`` samples; ``note`` says why one of them is NaN.

    ``unknown_keys`` is the share of ids that were never trained, None where it is not known (pruned rows).
    ``calibration`` is predicted positives over observed ones. ``in_groups`` are the metrics within groups,
    where the schema names a group. Of several labels these are the first's; ``tasks`` has those of each.
    """

    auc: float
    log_loss: float
    normalised_entropy: float
    accuracy: float
    base_rate: float
    num_samples: int
    note: str = ""
    unknown_keys: float | None = None
    unknown_by_feature: dict[str, float] = field(default_factory=dict)
    calibration: float = math.nan
    in_groups: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)

    def numbers(self) -> dict[str, float]:
        """All metrics by one name each, such as ``gauc`` or ``conversion/auc``."""
        flat = {name: getattr(self, name) for name in (*_NUMBERS, "num_samples")} | self.in_groups
        for task, values in self.tasks.items():
            flat |= {f"{task}/{name}": value for name, value in values.items()}
        return flat if self.unknown_keys is None else flat | {"unknown_keys": self.unknown_keys}


_NUMBERS = ("auc", "log_loss", "normalised_entropy", "accuracy", "base_rate", "calibration")


class BinaryMetrics:
    """Collects labels and logits batch by batch, 5 bytes per sample, and measures them together."""

    def __init__(self) -> None:
        self._labels: list[npt.NDArray[np.uint8]] = []
        self._logits: list[npt.NDArray[np.float32]] = []
        self.keys = KeyCounts()

    def update(self, labels: torch.Tensor | npt.ArrayLike, logits: torch.Tensor | npt.ArrayLike) -> None:
        """Add one batch: as many labels (0 or 1) as logits, of any shape."""
        label_array, logit_array = _to_array(labels), _to_array(logits)
        if label_array.size != logit_array.size:
            raise DataError(f"{label_array.size} labels do not match {logit_array.size} logits")
        if not np.isin(label_array, (0, 1)).all():
            raise DataError("labels for metrics must be 0 or 1")
        self._labels.append(label_array.ravel().astype(np.uint8))
        self._logits.append(logit_array.ravel().astype(np.float32))

    def compute(self) -> MetricValues:
        """The metrics of everything added so far."""
        labels = np.concatenate([np.empty(0, np.uint8), *self._labels])
        logits = np.concatenate([np.empty(0, np.float32), *self._logits])
        return replace(
            binary_values(labels, logits),
            unknown_keys=self.keys.share,
            unknown_by_feature=self.keys.shares,
        )


def binary_values(labels: Labels, logits: Logits) -> MetricValues:
    """All metrics of labels of 0 and 1."""
    return MetricValues(
        auc=auc(labels, logits),
        log_loss=log_loss(labels, logits),
        normalised_entropy=normalised_entropy(labels, logits),
        accuracy=accuracy(labels, logits),
        base_rate=_base_rate(labels),
        num_samples=len(labels),
        note=_undefined_because(labels, logits),
        calibration=calibration(labels, logits),
    )


def number_values(labels: npt.NDArray[np.floating[Any]], predicted: Logits) -> dict[str, float]:
    """Metrics of a label that is a number: root of the mean squared error, mean absolute error, R²."""
    count = len(labels)
    if not count:
        return dict.fromkeys(("rmse", "mae", "r2"), math.nan) | {"num_samples": 0}
    errors = predicted.astype(np.float64) - labels
    squares, spread = float(errors @ errors), float(np.var(labels.astype(np.float64)) * count)
    return {
        "rmse": math.sqrt(squares / count),
        "mae": float(np.abs(errors).mean()),
        "r2": 1 - squares / spread if spread else math.nan,
        "num_samples": count,
    }


def auc(labels: Labels, scores: Logits) -> float:
    """The chance that a positive sample scores above a negative one, a tie counting half.

    Exact, for any increasing score. NaN when there is only one class or a score is NaN.
    """
    positive = labels.astype(bool)
    above, below = np.sort(scores[positive]), np.sort(scores[~positive])
    if not len(above) or not len(below) or np.isnan(above[-1]) or np.isnan(below[-1]):
        return math.nan
    wins = np.searchsorted(below, above, side="left").sum()
    wins_and_ties = np.searchsorted(below, above, side="right").sum()
    return (int(wins) + int(wins_and_ties)) / (2 * len(above) * len(below))


def log_loss(labels: Labels, logits: Logits) -> float:
    """The mean of -log(probability given to what happened), in nats."""
    if not len(labels):
        return math.nan
    sums = []
    for first in range(0, len(labels), _BLOCK):
        sign = 1.0 - 2.0 * labels[first : first + _BLOCK].astype(np.float64)
        with np.errstate(invalid="ignore"):  # a NaN makes the loss NaN, without a warning
            sums.append(float(np.logaddexp(0.0, sign * logits[first : first + _BLOCK]).sum()))
    return math.fsum(sums) / len(labels)


def normalised_entropy(labels: Labels, logits: Logits) -> float:
    """Log loss over that of always predicting the base rate: below 1 is better than knowing nothing.

    He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", 2014. NaN when there is
    only one class.
    """
    rate = _base_rate(labels)
    if not 0.0 < rate < 1.0:
        return math.nan
    return log_loss(labels, logits) / -(rate * math.log(rate) + (1.0 - rate) * math.log1p(-rate))


def accuracy(labels: Labels, logits: Logits) -> float:
    """The share of samples on the right side of probability one half; one half itself predicts 0."""
    return float(np.mean((logits > 0) == labels.astype(bool))) if len(labels) else math.nan


def calibration(labels: Labels, logits: Logits) -> float:
    """Predicted positives over observed ones: 1 is right on average. NaN without a positive sample."""
    positive, sums = int(np.count_nonzero(labels)), []
    for first in range(0, len(labels), _BLOCK):
        with np.errstate(over="ignore"):  # far out, a probability is 0
            sums.append(
                float((1.0 / (1.0 + np.exp(-logits[first : first + _BLOCK].astype(np.float64)))).sum())
            )
    return math.fsum(sums) / positive if positive else math.nan


def _base_rate(labels: Labels) -> float:
    return float(np.mean(labels)) if len(labels) else math.nan


def _undefined_because(labels: Labels, logits: Logits) -> str:
    if not len(labels):
        return "no samples were measured"
    if np.isnan(logits).any():
        return "the model returned NaN for some samples"
    if labels.min() == labels.max():
        return f"AUC and normalised entropy need both classes, all {len(labels):,} labels are {labels[0]:g}"
    return ""


def _to_array(given: torch.Tensor | npt.ArrayLike) -> npt.NDArray[Any]:
    if isinstance(given, torch.Tensor):
        return given.detach().to("cpu", torch.float32).numpy()
    return np.asarray(given)
