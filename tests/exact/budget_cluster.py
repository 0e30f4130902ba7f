"""Ranks of a cluster in one process whose rows are within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from in_process_cluster import AtRest, Rank
from training_case import Case

from rowhaul.budget.cluster.upkeep import HandOverNote
from rowhaul.data.samples import Samples
from rowhaul.schedule import IdBatch, Scheduler
from rowhaul.train.distributed.evaluation import score
from rowhaul.train.distributed.tables import layout_of, only_collection


class BudgetRank(Rank):
    """A rank that hands rows over; what that sends is counted apart from what plans do."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.scores: list[dict[int, float]] = []  # after each segment, of the samples that this worker scores
        self.notes: list[HandOverNote] = []
        self.handed_over: Counter[tuple[int, int]] = Counter()  # bytes, by source and target
        self._run, self.training.upkeep.run = self.training.upkeep.run, self._run_apart
        everyone.append(self)

    def _scheduler(self, ids: Iterator[IdBatch]) -> Scheduler:
        return layout_of(only_collection(self.model)).make_scheduler(self.case.settings, ids)

    def _rest(self) -> AtRest:
        """Tell what there is, and score some batches."""
        rest, posted = super()._rest(), Counter(self.links.posted)
        parts = [
            (batch.index.tolist(), logits.tolist())
            for batch, logits in score(self.training, scored_batches(self.case))
        ]
        self.scores.append({index: logit for part in parts for index, logit in zip(*part, strict=True)})
        self.links.posted = posted
        return rest

    def _run_apart(self, training) -> list[HandOverNote]:
        posted = Counter(self.links.posted)
        notes = self._run(training)
        self.handed_over += self.links.posted - posted
        self.links.posted = posted
        self.notes += notes
        return notes

    @property
    def noted_bytes(self) -> int:
        """What notes say was sent, the one that is not logged yet included."""
        return sum(note.num_bytes for note in (*self.notes, self.training.upkeep.note))


everyone: list[BudgetRank] = []  # that were made; for tests that look at them afterwards


def scored_batches(case: Case) -> list[Samples]:
    """Two batches, and one of ids that nobody has trained; all samples are told apart."""
    first, second = case.batches[0], case.batches[-1]
    unseen = replace(first, values=first.values // 2 + 100)
    some = enumerate([first, second, unseen])
    return [replace(one, index=np.arange(len(one)) + 1000 * number) for number, one in some]
