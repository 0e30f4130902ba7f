"""Early stopping: a run ends when evaluations have stopped getting better.

The metrics of an evaluation are the same on every rank, so all ranks end at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rowhaul.train.metrics import MetricValues

_FACT = "patience"


class Patience:
    """Counts evaluations since the best one.

    Args:
        most: evaluations in a row that may be no better; 0: any number.
    """

    def __init__(self, most: int) -> None:
        self._most, self._best, self._num_worse = most, math.inf, 0

    def count(self, metrics: MetricValues | None) -> None:
        """Count an evaluation, if there was one that measured something."""
        loss = _loss(metrics) if metrics is not None and self._most else None
        if loss is None:
            return
        if loss < self._best:
            self._best, self._num_worse = loss, 0
        else:
            self._num_worse += 1

    @property
    def is_over(self) -> bool:
        """Whether there were too many evaluations without a better one."""
        return 0 < self._most <= self._num_worse

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says of the evaluations so far."""
        if not self._most:
            return {}
        best = self._best if math.isfinite(self._best) else None  # before the first one
        return {_FACT: {"best": best, "num_worse": self._num_worse}}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Go on counting after those before a checkpoint; earlier versions did not note them."""
        if (saved := facts.get(_FACT)) is not None:
            self._best = math.inf if saved["best"] is None else saved["best"]
            self._num_worse = saved["num_worse"]

    @property
    def reason(self) -> str:
        """Why the run has ended, in words."""
        return f"the loss of the last {self._num_worse} evaluations was not below {self._best:.6f} (patience)"


def _loss(metrics: MetricValues) -> float | None:
    """The sum of log losses over labels, and of errors where a label is a number; None if no sample has any.

    A label that no sample has is left out: its loss is NaN, with which no evaluation would be a better one.
    """
    tasks = metrics.tasks.values() or [{"log_loss": metrics.log_loss, "num_samples": metrics.num_samples}]
    losses = [one["log_loss"] if "log_loss" in one else one["rmse"] for one in tasks if one["num_samples"]]
    return sum(losses) if losses else None
