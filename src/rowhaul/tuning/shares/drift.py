"""Notices that iterations have become slower than they were: the shares may no longer be the best."""

from __future__ import annotations

import statistics
from collections import deque

from rowhaul.tuning.shares.trial import JUDGED

WINDOW = 20  # iterations whose median counts
SETTLING = 10  # iterations after a decision, in which rows still move
SLOWER = 1.3  # than in the trial, or in the best window since then, for another look
FIRST_PATIENCE, MOST_PATIENCE = 40, 20_000  # iterations between a decision and another look


class Drift:
    """Watches the seconds per sample of iterations since the last decision.

    Args:
        slower: how many times as long they must take for another look.
    """

    def __init__(self, slower: float = SLOWER) -> None:
        self._slower = slower
        self._patience = FIRST_PATIENCE
        self.decided(changed=True)

    def decided(self, *, changed: bool, seconds: float = float("inf")) -> None:
        """Begin anew after a decision for shares that took these seconds per sample in their trial.

        A decision that changed nothing was in vain: the next look waits longer.
        """
        self._patience = FIRST_PATIENCE if changed else min(2 * self._patience, MOST_PATIENCE)
        self._count = 0
        self._best = seconds
        self._latest: deque[float] = deque(maxlen=WINDOW)

    @property
    def now(self) -> float:
        """Seconds per sample of the very latest iterations; infinite if there are none."""
        return statistics.median(list(self._latest)[-JUDGED:]) if self._latest else float("inf")

    def observe(self, seconds: float) -> bool:
        """Add the seconds per sample of an iteration; return whether shares should be looked at again."""
        self._count += 1
        if self._count <= SETTLING:
            return False
        self._latest.append(seconds)
        if len(self._latest) < WINDOW:
            return False
        typical = statistics.median(self._latest)
        self._best = min(self._best, typical)
        return self._count >= self._patience and typical > self._slower * self._best
