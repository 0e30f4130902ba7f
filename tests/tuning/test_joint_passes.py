"""How many passes `joint:auto` makes: as many as leave slack."""

import numpy as np

from rowhaul.planning.agreement import Postbox
from rowhaul.runtime.runtime import MEASURES
from rowhaul.schedule.dispatch.joint import MOST_PASSES, PASSES
from rowhaul.tuning.joint_passes import (
    OBSERVED_ITERATIONS,
    SKIPPED_ITERATIONS,
    PassesController,
    fits_passes,
)


class Run:
    """Three workers, one that is left out, and a store; plans take 1 ms, and 1 ms more a pass."""

    def __init__(self):
        self.postbox = Postbox()
        self.controller = PassesController(self.postbox.post, 4)
        self.passes, self.posted = PASSES, []

    def iterate(self, iterations, milliseconds):
        for _ in range(iterations):
            decision = 1e-3 * (1 + self.passes)
            measures = np.zeros((5, len(MEASURES)))
            measures[:3, MEASURES.index("samples")] = 100
            measures[3, MEASURES.index("slack")] = -1  # it has nothing to do but to wait for plans
            measures[:3, MEASURES.index("dispatch")] = decision
            measures[:3, MEASURES.index("slack")] = 1e-3 * milliseconds - decision
            measures[1, MEASURES.index("slack")] += 1e-3  # it waits for the others
            self.controller.observe(measures)
            for record in self.postbox.take(0):
                assert record.name == "passes"
                self.passes = record.value
                self.posted.append(record.value)


def test_passes_follow_the_slack():
    run = Run()
    run.iterate(SKIPPED_ITERATIONS + OBSERVED_ITERATIONS - 1, 100)
    assert run.posted == []
    run.iterate(1, 100)
    assert run.posted == [PASSES + 1]
    run.iterate(20 * OBSERVED_ITERATIONS, 100)
    assert run.passes == MOST_PASSES
    run.iterate(20 * OBSERVED_ITERATIONS, 5)  # 4 passes would do, and none would have time twice
    assert run.passes <= 4
    settled = len(run.posted)
    run.iterate(20 * OBSERVED_ITERATIONS, 5)
    assert len(run.posted) == settled  # no swinging between two numbers
    run.iterate(20 * OBSERVED_ITERATIONS, 0.5)
    assert run.passes == 0


def test_the_first_record_says_what_is_in_force():
    run = Run()  # a run that was resumed may start with other passes
    run.iterate(SKIPPED_ITERATIONS + OBSERVED_ITERATIONS, 1.5 * (1 + PASSES))
    assert run.posted == [PASSES]


def test_only_joint_auto_leaves_its_passes_open():
    assert fits_passes("joint:auto")
    assert fits_passes("two-batch:joint:passes=auto")
    assert not any(map(fits_passes, ("joint", "joint:8", "laia", "two-batch:joint")))
