"""Notices that dense sums take longer than they did: links may have changed, and another way may be quicker.

Rank 0 watches, and all ranks pause to choose again. `--shares auto` measures links by itself.
"""

from __future__ import annotations

import numpy as np

from rowhaul.runtime.mover import Job
from rowhaul.runtime.runtime import MEASURES
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.tuning.shares.candidates import sum_seconds
from rowhaul.tuning.shares.controller import Report
from rowhaul.tuning.shares.drift import Drift

SLOWER = 1.5  # than in the best window since the last choice
LEAST_SECONDS = 5e-3  # shorter sums depend on processors more than on links


class SumWatch:
    """Watches the sums of a run.

    Args:
        training: the run.
        report: called with lines about changes.
    """

    def __init__(self, training: DistributedTraining, report: Report) -> None:
        self._training, self._report = training, report
        self._drift = Drift(SLOWER)
        self._is_slow = False

    def observe(self, job: Job) -> None:
        """Record an iteration."""
        if job.measures is None:
            return
        measures = job.measures[: job.plan.num_workers]
        if np.count_nonzero(measures[:, MEASURES.index("samples")]) > 1:
            self._is_slow |= self._drift.observe(max(sum_seconds([measures]), LEAST_SECONDS))

    def wants_review(self) -> bool:
        """Whether `review` should be called soon; asked on rank 0 with every plan, in another thread."""
        return self._is_slow

    def review(self) -> None:
        """Choose anew how to sum; all ranks call this between the same two segments."""
        if self._is_slow:
            self._report("dense sums take longer than before: the way to sum is chosen again")
        self._training.runtime.choose_sums_again()
        self._drift.decided(changed=False)
        self._is_slow = False
