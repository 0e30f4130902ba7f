"""How many tables `laia-adaptive` may score: as many as the time for a decision allows (Herald, 4.3).

Measured times enter a schedule only as control records, so this decides and the caller posts.
"""

from __future__ import annotations

import statistics

OBSERVED_DECISIONS = 8  # between two looks at the clock; a record needs two iterations to take effect
COMFORTABLE = 0.8  # of the budget; below, one more table is tried


class TablesBudget:
    """Follows the decisions' times and says when to score more or fewer tables."""

    def __init__(self, num_tables: int, budget_seconds: float) -> None:
        self._num_tables = num_tables
        self._budget = budget_seconds
        self._scored = num_tables
        self._recent: list[float] = []

    def observe(self, decision_seconds: float) -> int | None:
        """Take note of one decision; returns the number of tables to score from now on if it changes."""
        self._recent.append(decision_seconds)
        if len(self._recent) < OBSERVED_DECISIONS:
            return None
        typical = statistics.median(self._recent)
        self._recent.clear()
        before = self._scored
        if typical > self._budget:
            self._scored = min(before - 1, int(before * self._budget / typical))
        elif typical < COMFORTABLE * self._budget:
            self._scored = before + 1
        self._scored = min(max(self._scored, 0), self._num_tables)
        return self._scored if self._scored != before else None
