"""What a perfect model would measure: AUC and log loss of the true probabilities, block by block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_BINS = 1 << 16
_RANGE = 16.0  # logits beyond ± this share the outermost bins


@dataclass(frozen=True)
class BayesFacts:
    """How well the labels can be predicted at best.

    ``normalised_entropy`` is the log loss divided by that of always predicting ``base_rate``, the share
    of positive labels. A value that the labels do not define (one class only) is NaN.
    """

    auc: float
    log_loss: float
    normalised_entropy: float
    base_rate: float


class BayesMeter:
    """Accumulates `BayesFacts` over any number of samples in constant memory.

    Probabilities are binned by logit, 65,536 bins over ±16; samples of one bin count as ties, which
    moves the AUC by less than 1e-5.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((2, _BINS), np.int64)  # label x bin
        self._loss = 0.0

    def add(self, probabilities: npt.NDArray[np.float64], labels: npt.NDArray[np.bool_]) -> None:
        """Take in some samples."""
        p = np.clip(probabilities, 1e-15, 1 - 1e-15)
        self._loss -= float(np.log(np.where(labels, p, 1.0 - p)).sum())
        logits = np.log(p / (1.0 - p))
        bins = np.clip((logits + _RANGE) * (_BINS / (2 * _RANGE)), 0, _BINS - 1).astype(np.int64)
        for label in (0, 1):
            self._counts[label] += np.bincount(bins[labels == label], minlength=_BINS)

    def facts(self) -> BayesFacts:
        """The facts of all samples taken in so far."""
        negatives, positives = (int(total) for total in self._counts.sum(axis=1))
        rows = negatives + positives
        if not rows:
            return BayesFacts(*(float("nan"),) * 4)
        rate, loss = positives / rows, self._loss / rows
        if not negatives or not positives:
            return BayesFacts(float("nan"), loss, float("nan"), rate)
        below = np.cumsum(self._counts[0]) - self._counts[0] / 2
        auc = float((self._counts[1] * below).sum()) / (negatives * positives)
        entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
        return BayesFacts(auc, loss, loss / float(entropy), rate)
