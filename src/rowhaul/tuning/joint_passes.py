"""`--dispatcher joint:auto`: as many passes of the search as training leaves time for.

Slack is how long a plan lay ready before a worker needed it. While there is plenty, `joint` may look at
samples once more; as soon as training waits for plans, it looks half as often. The passes are a control
record: in force in the same iteration on all ranks. Clocks decide, so two runs agree to rounding only.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.runtime import MEASURES
from rowhaul.schedule.dispatch import Dispatcher, make_dispatcher
from rowhaul.schedule.dispatch.joint import MOST_PASSES, PASSES, Joint
from rowhaul.schedule.dispatch.two_batches import TwoBatches

SKIPPED_ITERATIONS = 3  # kernels may compile
OBSERVED_ITERATIONS = 12  # from one decision to the next; a record needs two to take effect
AMPLE = 1.0  # slack over the time of a decision: it could take twice as long


def fits_passes(dispatcher: str | Dispatcher) -> bool:
    """Whether a dispatcher leaves its passes to the slack."""
    made = make_dispatcher(dispatcher) if isinstance(dispatcher, str) else dispatcher
    inner = made.inner if isinstance(made, TwoBatches) else made
    return isinstance(inner, Joint) and inner.passes == "auto"


class PassesController:
    """Watches slack on rank 0 and decides how many passes `joint` makes.

    Args:
        post: takes the name and value of a control record.
        num_workers: ranks that train; only they have slack.
    """

    def __init__(self, post: Callable[[str, int], None], num_workers: int) -> None:
        self._post, self._num_workers = post, num_workers
        self._passes: int | None = None  # before the first record, which says what a resumed run starts with
        self._num_seen = 0
        self._slack: list[float] = []
        self._decision: list[float] = []

    def observe(self, measures: npt.NDArray[np.float64] | None) -> None:
        """Record the measurements of an iteration, ranks x `MEASURES`; post a change."""
        if measures is None:
            return
        self._num_seen += 1
        if self._num_seen <= SKIPPED_ITERATIONS:
            return
        workers = measures[: self._num_workers]
        workers = workers[workers[:, MEASURES.index("samples")] > 0]  # others wait for the next plan anyway
        if not len(workers):
            return
        self._slack.append(float(workers[:, MEASURES.index("slack")].min()))
        self._decision.append(float(workers[:, MEASURES.index("dispatch")].max()))
        if len(self._slack) < OBSERVED_ITERATIONS:
            return
        slack, decision = statistics.median(self._slack), statistics.median(self._decision)
        self._slack.clear()
        self._decision.clear()
        before = self._passes
        passes = PASSES if before is None else before
        if slack < 0:
            passes //= 2
        elif slack > AMPLE * decision:
            passes = min(passes + 1, MOST_PASSES)
        if passes != before:
            self._passes = passes
            self._post("passes", passes)
