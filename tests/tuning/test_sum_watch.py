"""Dense sums that take longer: all ranks choose again how to sum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from rowhaul.runtime.runtime import MEASURES
from rowhaul.tuning.shares.drift import FIRST_PATIENCE
from rowhaul.tuning.sum_watch import LEAST_SECONDS, SLOWER, SumWatch


class Run:
    """A run whose sums take given times; its last worker is left out."""

    def __init__(self) -> None:
        self.num_chosen = 0
        self.told: list[str] = []
        runtime = SimpleNamespace(choose_sums_again=self._choose)
        training: Any = SimpleNamespace(runtime=runtime)
        self.watch = SumWatch(training, self.told.append)

    def _choose(self) -> None:
        self.num_chosen += 1

    def go(self, count: int, seconds: float, workers: int = 2) -> None:
        measures = np.zeros((4, len(MEASURES)))
        measures[:workers, MEASURES.index("samples")] = 8
        measures[:, MEASURES.index("all_reduce")] = [seconds, 3 * seconds, 0.0, 0.0]
        for _ in range(count):
            job: Any = SimpleNamespace(measures=measures, plan=SimpleNamespace(num_workers=3))
            self.watch.observe(job)
            if self.watch.wants_review():
                self.watch.review()


def test_slower_sums_lead_to_another_choice_and_then_to_patience() -> None:
    run = Run()
    run.go(3 * FIRST_PATIENCE, 0.02)
    assert run.num_chosen == 0
    run.go(3 * FIRST_PATIENCE, 0.021 * SLOWER)
    assert run.num_chosen == 1
    assert run.told == ["dense sums take longer than before: the way to sum is chosen again"]
    run.go(20 * FIRST_PATIENCE, 0.021 * SLOWER)
    assert run.num_chosen == 1, "what is usual now is not slow"


def test_short_sums_and_one_worker_alone_are_no_reason() -> None:
    run = Run()
    run.go(3 * FIRST_PATIENCE, LEAST_SECONDS / 10)
    run.go(3 * FIRST_PATIENCE, LEAST_SECONDS)
    run.go(3 * FIRST_PATIENCE, 1.0, workers=1)
    assert run.num_chosen == 0
