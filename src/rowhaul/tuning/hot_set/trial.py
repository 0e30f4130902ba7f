"""Sets of hot rows that take turns in training: a model proposes them, iterations decide.

Calibration may be off, above all on a busy machine, and a choice that rests on it alone would stay wrong. So
the best sizes of the model, and none at all, each have a few iterations, there and back again: whatever slows
the machine for a while meets more than one of them. Rank 0 alone decides; all ranks know whose turn it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from rowhaul.schedule import HotRows
from rowhaul.simulate.hot import HotModel, Prediction
from rowhaul.tuning.hot_set.watch import CALM

TURN = 10  # iterations that a set has at a time
SKIPPED = 3  # of these, at the beginning: rows that have left the set are not cached yet
WORTH_TRYING = 1.25  # a size that is predicted to take longer than so many times the best is not tried
AS_QUICK = 1.03  # sets this near the quickest may well be as quick: the one that the model likes best stays
APART = 2  # how many times larger or smaller than the best another size is, to be tried beside it


class HotTrial:
    """Sets that take turns, there and back again.

    Args:
        sets: of rows, which differ; those first that are expected to be the best.
    """

    def __init__(self, sets: Sequence[HotRows]) -> None:
        self.sets = list(sets)
        # By size: the most frequent rows are in all of them, and need not be exchanged.
        there = sorted(range(len(self.sets)), key=lambda place: len(self.sets[place]))
        self._turns = [*there, *reversed(there)]
        self._turn_seconds: list[list[float]] = [[] for _ in self.sets]  # what an iteration took in each turn

    @property
    def is_over(self) -> bool:
        """Whether all sets have had all their turns."""
        return not self._turns

    @property
    def in_turn(self) -> HotRows:
        """The set whose turn it is."""
        return self.sets[self._turns[0]]

    def end_turn(self, seconds: Sequence[float]) -> None:
        """Let the next set have its turn; the one before had iterations that took so long."""
        place = self._turns.pop(0)
        if seconds:
            self._turn_seconds[place].append(float(np.quantile(seconds, CALM)))

    def typical_seconds(self) -> list[float]:
        """What an iteration took with each set; infinite for one that was not timed."""
        return [statistics.mean(one) if one else float("inf") for one in self._turn_seconds]

    def quickest(self) -> int:
        """The number of the set with the shortest iterations; of those as quick, even in one turn, the first.

        The first is expected to be the best, and turns of one set may differ by more than two sets do.
        """
        quick = AS_QUICK * min(self.typical_seconds())
        in_best_turn = [min(one, default=float("inf")) for one in self._turn_seconds]
        return next((place for place, one in enumerate(in_best_turn) if one <= quick), 0)

    def result(self) -> str:
        """What was found, in words."""
        typical, best = self.typical_seconds(), self.quickest()
        tried = ", ".join(
            f"{len(rows):,} {seconds * 1e3:.1f} ms" for rows, seconds in zip(self.sets, typical, strict=True)
        )
        return (
            f"hot rows: {len(self.sets[best]):,} on every worker, {typical[best] * 1e3:.1f} ms an iteration, "
            f"as quick as any of those tried ({tried})"
        )


def worth_trying(model: HotModel, best: Prediction) -> list[Prediction]:
    """Sizes that deserve a trial once a model has chosen one: that, 0, and the best that is not near it."""
    others = [
        one
        for one in model.tried
        if one.num_rows
        and not best.num_rows < APART * one.num_rows < APART**2 * best.num_rows
        and one.seconds <= WORTH_TRYING * best.seconds
    ]
    found = {one.num_rows: one for one in (best, *sorted(others, key=_seconds)[:1], model.predict(0))}
    return list(found.values())


def _seconds(one: Prediction) -> float:
    return one.seconds


def same_rows(one: HotRows | None, other: HotRows | None) -> bool:
    """Whether two sets have the same rows; None has none."""
    if one is None or other is None:
        return not len(one or other or ())
    return np.array_equal(one.tables, other.tables) and np.array_equal(one.keys, other.keys)


def different(sets: Sequence[HotRows]) -> list[HotRows]:
    """The sets without those that came before, in order."""
    kept: list[HotRows] = []
    for one in sets:
        if not any(same_rows(one, other) for other in kept):
            kept.append(one)
    return kept
