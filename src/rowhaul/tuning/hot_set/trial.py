"""A trial of several hot sets in training: a model proposes them, measured iterations decide.

Calibration may be off, above all on a busy machine, and a choice that rests on it alone would stay wrong. So
the best sizes of the model, and none at all, each get a few iterations, in order and then in reverse order:
a temporary slowdown of the machine affects more than one of them. Rank 0 decides; all ranks know the order.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from rowhaul.schedule import HotRows
from rowhaul.simulate.hot import HotModel, Prediction
from rowhaul.tuning.hot_set.watch import CALM

TURN = 10  # iterations of a set at a time
SKIPPED = 3  # of these, at the beginning: rows that have left the set are not cached yet
WORTH_TRYING = 1.25  # sizes predicted to take more than this times the best are not tried
AS_QUICK = 1.03  # sets within this factor of the quickest count as equal: the model's favourite stays
APART = 2  # the least factor between the best size and another that is tried beside it


class HotTrial:
    """Hot sets that take turns, in order and then in reverse.

    Args:
        sets: different sets of rows; those expected to be the best first.
    """

    def __init__(self, sets: Sequence[HotRows]) -> None:
        self.sets = list(sets)
        # By size: the most frequent rows are in all of them, and need not be exchanged.
        order = sorted(range(len(self.sets)), key=lambda place: len(self.sets[place]))
        self._turns = [*order, *reversed(order)]
        self._turn_seconds: list[list[float]] = [[] for _ in self.sets]  # of an iteration, in each turn

    @property
    def is_over(self) -> bool:
        """Whether all sets have had all their turns."""
        return not self._turns

    @property
    def in_turn(self) -> HotRows:
        """The set whose turn it is."""
        return self.sets[self._turns[0]]

    def end_turn(self, seconds: Sequence[float]) -> None:
        """End a turn, given the seconds of its iterations."""
        place = self._turns.pop(0)
        if seconds:
            self._turn_seconds[place].append(float(np.quantile(seconds, CALM)))

    def typical_seconds(self) -> list[float]:
        """The seconds of an iteration with each set; infinite for one that was not timed."""
        return [statistics.mean(one) if one else float("inf") for one in self._turn_seconds]

    def quickest(self) -> int:
        """The number of the quickest set; the first of those that are as quick in their best turn.

        The first is expected to be the best, and turns of one set may differ by more than two sets do.
        """
        quick = AS_QUICK * min(self.typical_seconds())
        in_best_turn = [min(one, default=float("inf")) for one in self._turn_seconds]
        return next((place for place, one in enumerate(in_best_turn) if one <= quick), 0)

    def result(self) -> str:
        """Describe the outcome."""
        typical, best = self.typical_seconds(), self.quickest()
        tried = ", ".join(
            f"{len(rows):,} {seconds * 1e3:.1f} ms" for rows, seconds in zip(self.sets, typical, strict=True)
        )
        return (
            f"hot rows: {len(self.sets[best]):,} on every worker, {typical[best] * 1e3:.1f} ms an iteration, "
            f"as quick as any of those tried ({tried})"
        )


def worth_trying(model: HotModel, best: Prediction) -> list[Prediction]:
    """Choose the sizes to try: the model's best, the best one of another magnitude, and 0."""
    others = [
        one
        for one in model.tried
        if one.num_rows
        and not best.num_rows < APART * one.num_rows < APART**2 * best.num_rows
        and one.seconds <= WORTH_TRYING * best.seconds
    ]
    other = sorted(others, key=lambda one: one.seconds)[:1]
    return list({one.num_rows: one for one in (best, *other, model.predict(0))}.values())


def same_rows(one: HotRows | None, other: HotRows | None) -> bool:
    """Whether two sets have the same rows; None has none."""
    if one is None or other is None:
        return not len(one or other or ())
    return np.array_equal(one.tables, other.tables) and np.array_equal(one.keys, other.keys)


def different(sets: Sequence[HotRows]) -> list[HotRows]:
    """Drop sets that occurred before."""
    kept: list[HotRows] = []
    for one in sets:
        if not any(same_rows(one, other) for other in kept):
            kept.append(one)
    return kept
