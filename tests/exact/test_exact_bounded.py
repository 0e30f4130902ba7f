"""Bounded staleness: exact with a bound of 0; beyond, no copy lags and no update waits more than the bound.

How far copies lag is measured on the rows themselves: every row has a value for each worker, which counts
that worker's updates.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from cluster_checks import check_run
from exact_cases import cases, random_samples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from in_process_cluster import Rank, run_cluster
from training_case import Case, Row, row_sizes

from rowhaul.nn import Batch, EmbeddingBagConfig
from rowhaul.optim import SGD
from rowhaul.schedule import CacheSettings, Plan, ScheduleSettings, Topology
from rowhaul.schedule.plan import Kind

NO_SHRINKING = (Phase.explicit, Phase.generate)
NUM_WORKERS = 3


@pytest.mark.slow
@settings(max_examples=5, derandomize=True, phases=NO_SHRINKING)
@given(cases("full", undecided=True))
def test_a_bound_of_zero_is_full_synchronisation(case: Case) -> None:
    full = run_cluster(case)
    bounded = run_cluster(replace(case, settings=replace(case.settings, sync="bounded:0")))
    assert all(map(np.array_equal, full.workers, bounded.workers))
    assert full.losses == bounded.losses
    for segment in range(len(case.segments)):
        rows, others = full.rows(segment), bounded.rows(segment)
        assert rows.keys() == others.keys()
        assert all(np.array_equal(rows[row], others[row]) for row in rows)


@pytest.mark.slow
@settings(max_examples=6, derandomize=True, phases=NO_SHRINKING)
@given(st.sampled_from(["bounded:1", "bounded:2", "bounded:5"]).flatmap(cases))
def test_training_with_stale_rows_goes_on(case: Case) -> None:
    outcome = run_cluster(case)
    assert len(outcome.losses) == len(case.batches)
    assert np.isfinite(outcome.losses).all()
    assert all(np.isfinite(record).all() for record in outcome.rows().values())
    check_run(case, outcome)


class UpdateCounts:
    """What the plans say: how many updates of each worker a home has, and how many wait."""

    def __init__(self) -> None:
        self.at_home: defaultdict[Row, np.ndarray] = defaultdict(lambda: np.zeros(NUM_WORKERS))
        self.made: defaultdict[Row, np.ndarray] = defaultdict(lambda: np.zeros(NUM_WORKERS))

    def push(self, plan: Plan, *, after: bool) -> None:
        for moves in filter(None, (plan.moves, plan.local_moves)):
            pushed = np.isin(moves.kind, (Kind.UPDATE_PUSH, Kind.EVICT_PUSH)) & (moves.after == after)
            for m in np.flatnonzero(pushed):
                row, worker = (int(moves.table[m]), int(moves.key[m])), int(moves.source[m])
                self.at_home[row][worker] = self.made[row][worker]

    def train(self, plan: Plan) -> None:
        for table, key, trainers in zip(plan.tables, plan.keys, plan.trainers.tolist(), strict=True):
            for worker in range(NUM_WORKERS):
                self.made[int(table), int(key)][worker] += trainers >> worker & 1


def count_updates(reads: dict[tuple[int, int], dict[Row, np.ndarray]]):
    """Train so that each update adds 1 to the worker's own place, and note what the worker read before."""

    def train(rank: Rank, batch: Batch) -> float:
        rank.model(batch).sum().backward()
        source = rank.model.rows.source
        (tables,), (pending,) = source.tables, source.pending
        found = reads[rank.rank, rank.training.iteration] = {}
        for lookup, gradients in pending:
            for key, record in zip(lookup.keys.tolist(), tables.arena.read(lookup.locations), strict=True):
                found[0, key] = record
            gradients[:] = 0
            gradients[:, rank.rank] = -1  # at a rate of 1
        rank.training.step()
        rank.dense.zero_grad()
        return 0.0

    return train


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("colocated", [False, True])
def test_neither_copies_nor_updates_are_staler_than_the_bound(staleness: int, colocated: bool) -> None:
    case = counting_case(staleness, colocated)
    reads: dict[tuple[int, int], dict[Row, np.ndarray]] = {}
    outcome = run_cluster(case, train=count_updates(reads))
    counts, most_lag, most_waiting = UpdateCounts(), 0, 0
    for plan in outcome.plans:
        for worker in range(NUM_WORKERS):
            for row, copy in reads[worker, plan.iteration].items():
                assert copy[worker] == counts.made[row][worker], "a worker misses an update of its own"
                assert (copy <= counts.made[row]).all(), "a copy has updates that nobody made"
                lag = int(np.maximum(counts.at_home[row] - copy, 0).sum())
                most_lag = max(most_lag, lag)
        counts.push(plan, after=False)
        counts.train(plan)
        counts.push(plan, after=True)
        most_waiting = max(
            most_waiting, *(int((made - counts.at_home[row]).max()) for row, made in counts.made.items())
        )
        for segment, rest in enumerate(outcome.rests[0]):
            if rest.iteration == plan.iteration + 1:  # the settled model has what still waits, too
                flushed = outcome.rows(segment)
                assert flushed.keys() == counts.made.keys()
                assert all(np.array_equal(flushed[row], made) for row, made in counts.made.items())
    assert most_lag == staleness, "the bound is used, and kept"
    assert most_waiting == staleness
    check_run(case, outcome)


def counting_case(staleness: int, colocated: bool) -> Case:
    rng = np.random.default_rng(staleness)
    tables = (
        EmbeddingBagConfig(
            embedding_dim=NUM_WORKERS, name="t", feature_names=["f"], weight_init_min=0.0, weight_init_max=0.0
        ),
    )
    batches = tuple(random_samples(rng, ("f",), 7, range(12), 2) for _ in range(30))
    settings = ScheduleSettings(
        topology=Topology(NUM_WORKERS, num_stores=2, colocated=colocated),
        sizes=row_sizes(tables, SGD(lr=1.0), Case.dtype),
        prices=(1, 2, 5),
        cache=CacheSettings(capacity=7),
        dispatcher="random",
        sync=f"bounded:{staleness}",
        look_ahead=2,
    )
    return Case(tables, SGD(lr=1.0), settings, batches, rates=lambda iteration: 1.0, segments=(9, 1, None))
