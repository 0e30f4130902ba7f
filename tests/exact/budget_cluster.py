"""Ranks of a cluster in one process whose rows are within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from in_process_cluster import Rank

from rowhaul.budget.cluster.upkeep import HandOverNote
from rowhaul.schedule import IdBatch, Scheduler
from rowhaul.train.distributed.training import layout_of, only_collection


class BudgetRank(Rank):
    """A rank that hands rows over; what that sends is counted apart from what plans do."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.notes: list[HandOverNote] = []
        self.handed_over: Counter[tuple[int, int]] = Counter()  # bytes, by source and target
        self._run, self.training.upkeep.run = self.training.upkeep.run, self._run_apart
        everyone.append(self)

    def _scheduler(self, ids: Iterator[IdBatch]) -> Scheduler:
        return layout_of(only_collection(self.model)).make_scheduler(self.case.settings, ids)

    def _run_apart(self, training) -> list[HandOverNote]:
        posted = Counter(self.links.posted)
        notes = self._run(training)
        self.handed_over += self.links.posted - posted
        self.links.posted = posted
        self.notes += notes
        return notes


everyone: list[BudgetRank] = []  # that were made; for tests that look at them afterwards
