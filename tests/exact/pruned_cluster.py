"""Ranks of a cluster in one process whose rows are pruned, and what must hold of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from cluster_checks import check_bytes, check_memory
from in_process_cluster import Outcome, Rank
from pruned_oracle import LEAST_ENTRIES, PrunedAlone
from training_case import Case, Row

from rowhaul.pruning.cluster.pruning import PruneNote
from rowhaul.pruning.layout import ChunkLayout
from rowhaul.pruning.scheduling import ChunkScheduler
from rowhaul.schedule import IdBatch, Scheduler
from rowhaul.train.distributed.tables import layout_of, only_collection


class PrunedRank(Rank):
    """A rank that prunes; what that sends is counted apart from what plans do."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.notes: list[PruneNote] = []
        self.sent_to_prune = 0
        pruning = self.training.upkeep
        self._prune, pruning.prune = pruning.prune, self._prune_apart
        self._narrow, pruning.narrow = pruning.narrow, self._narrow_apart

    def _scheduler(self, ids: Iterator[IdBatch]) -> Scheduler:
        layout = layout_of(only_collection(self.model))
        assert isinstance(layout, ChunkLayout)
        return ChunkScheduler(self.case.settings, layout, ids, LEAST_ENTRIES)

    def _narrow_apart(self, *arguments) -> bool:
        posted = Counter(self.links.posted)
        is_done = self._narrow(*arguments)
        self.links.posted = posted
        return is_done

    def _prune_apart(self, *arguments) -> PruneNote:
        posted = Counter(self.links.posted)
        note = self._prune(*arguments)
        self.sent_to_prune = (self.links.posted - posted).total()
        self.links.posted = posted
        self.notes.append(note)
        return note


def check_pruned(case: Case, outcome: Outcome, alone: PrunedAlone) -> None:
    """The cluster has learned and kept what one process did, to the bit, and ranks agree."""
    for jobs in outcome.jobs[1:]:
        assert [job.plan.digest() for job in jobs] == [plan.digest() for plan in outcome.plans]
    check_bytes(outcome)
    check_memory(case, outcome)
    assert outcome.losses == alone.losses
    for held, most in alone.num_held:
        assert held <= most
    for segment, rest in enumerate(outcome.rests[0]):
        for rests in outcome.rests:
            chunks = chunks_of(rests[segment].scheduler)
            ahead = (
                chunks.keys() - alone.present[rest.iteration].keys()
            )  # rows of batches that are read ahead
            assert ahead <= _named_from(case, rest.iteration)
            assert {row: chunks[row] for row in chunks.keys() - ahead} == alone.present[rest.iteration]
        found, expected = outcome.rows(segment), alone.records[rest.iteration]
        assert found.keys() == expected.keys()
        different = [row for row, record in expected.items() if not np.array_equal(found[row], record)]
        assert not different, f"after iteration {rest.iteration} chunks {different} differ"
        assert all(map(np.array_equal, rest.dense, alone.dense[rest.iteration]))


def check_close(case: Case, outcome: Outcome, alone: PrunedAlone) -> None:
    """The cluster keeps the chunks of one process that trains whole batches, up to rounding."""
    np.testing.assert_allclose(outcome.losses, alone.losses, rtol=1e-9, atol=1e-9)
    for segment, rest in enumerate(outcome.rests[0]):
        present, expected = alone.present[rest.iteration], alone.records[rest.iteration]
        chunks = chunks_of(rest.scheduler)
        assert {row: some for row, some in chunks.items() if row in present} == present
        found = outcome.rows(segment)
        assert found.keys() == expected.keys()
        for row, record in expected.items():
            np.testing.assert_allclose(found[row], record, rtol=1e-9, atol=1e-9)
        for one, other in zip(rest.dense, alone.dense[rest.iteration], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def _named_from(case: Case, iteration: int) -> set[Row]:
    """The rows that batches from an iteration on name, up to where they may be pruned next."""
    end = min(iteration + case.settings.look_ahead, case.pruning.next_stop(iteration))
    batches = list(case.id_batches())[iteration:end]
    return {row for ids in batches for row in zip(ids.tables.tolist(), ids.keys.tolist(), strict=True)}


def chunks_of(saved: dict[str, np.ndarray]) -> dict[Row, tuple[bool, ...]]:
    """Which chunks of which rows there are, as a scheduler has saved it."""
    tables, keys = saved["chunks.tables"].tolist(), saved["chunks.keys"].tolist()
    present = saved["chunks.present"].reshape(len(keys), saved["chunks.facts"][5]).tolist()
    rows = zip(tables, keys, strict=True)
    return {row: tuple(some) for row, some in zip(rows, present, strict=True)}
