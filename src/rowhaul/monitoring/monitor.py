"""`Monitor`: what a training run reports while it goes on.

The training thread calls these methods, so they are quick, never wait and never raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.schedule import Plan

STARTING, TRAINING, EVALUATING, SAVING, FINISHED = "starting", "training", "evaluating", "saving", "finished"
PHASES = (STARTING, TRAINING, EVALUATING, SAVING, FINISHED)


@dataclass(frozen=True)
class RankLabels:
    """How metrics name a rank."""

    rank: int
    role: str  # worker or store
    host: str


class Monitor:
    """Follows a run; this one does nothing."""

    def joined(
        self,
        ranks: Sequence[RankLabels],
        tables: Sequence[str],
        measures: Sequence[str],
        error: Callable[[], BaseException | None],
    ) -> None:
        """The ranks of a cluster are connected.

        Args:
            ranks: all of them, in order.
            tables: the name of each table that plans number.
            measures: names of the numbers that ranks report.
            error: what this rank has failed with, such as the loss of another one.
        """

    def started(self, step: int, samples: int, total_steps: int, total_samples: int) -> None:
        """Training begins, perhaps where an earlier run has stopped."""

    def begin(self, phase: str) -> None:
        """Enter one of `PHASES`."""

    def reach(self, step: int, samples: int) -> None:
        """Count the steps and samples so far, of the whole run."""

    def stepped(self, step: int, samples: int, loss: float) -> None:
        """A step is done; ``samples`` counts all so far."""

    def logged(self, samples_per_second: float) -> None:
        """The speed since the last line of the log."""

    def hold(self, rows: Mapping[str, int]) -> None:
        """Count the rows of each table."""

    def iterated(self, plan: Plan, measures: npt.NDArray[np.float64] | None) -> None:
        """An iteration of a cluster is over: its plan, and what came with it, ranks x measures."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """An evaluation is done."""

    def scored(self, step: int, values: Mapping[str, float]) -> None:
        """A window of progressive validation has ended."""

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Enclose saving a checkpoint that training waits for."""
        began = time.monotonic()
        try:
            yield
        except Exception:
            self.save_failed(step)
            raise
        self.saved(step, time.monotonic() - began)

    def saved(self, step: int, seconds: float) -> None:
        """A checkpoint is complete; may be called from another thread."""

    def save_failed(self, step: int) -> None:
        """A checkpoint could not be saved."""


NO_MONITOR = Monitor()
