"""Rows that stay at home: no plan says where they are, and the cluster trains what one process trains."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from exact_cases import cases
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from in_process_cluster import Outcome, run_cluster
from oracles import assert_bit_equal, assert_close, plain, replay
from training_case import Case

from rowhaul.schedule import Scheduler, Topology, homes_of
from rowhaul.schedule.row_states import State

NO_SHRINKING = (Phase.explicit, Phase.generate)  # it takes longer than a test may; cases are small anyway


@st.composite
def at_home_cases(draw: st.DrawFn, num_workers: int | None = None) -> Case:
    """Whatever a case may be that needs no plan of rows."""
    case = draw(cases("full", undecided=True))
    num_workers = num_workers or draw(st.sampled_from([2, 3, 4, 1]))
    shares = st.tuples(*[st.integers(0, 3)] * num_workers).filter(any)
    return replace(
        case,
        settings=replace(
            case.settings,
            topology=Topology(num_workers, 0, colocated=True, peer_to_peer=draw(st.booleans())),
            prices=(1,) * num_workers,
            cache=replace(case.settings.cache, capacity=0),
            dispatcher=draw(st.sampled_from(["round-robin", "random"])),
            sync="at-home",
            shares=draw(st.one_of(st.none(), shares)),
            policies=(),
            hot=None,
        ),
    )


def check(case: Case, outcome: Outcome) -> None:
    """One process learns the same; nothing is left in caches; links carry what the samples need, no more."""
    assert len(outcome.plans) == len(case.batches)
    assert_bit_equal(case, outcome, replay(case, outcome))
    if case.dtype == torch.float64:
        assert_close(case, outcome, plain(case, outcome))
    for rank, rests in enumerate(outcome.rests):
        for rest in rests:
            assert not rest.cached
            assert not rest.waiting
            assert set(rest.states["state"].tolist()) <= {State.FRESH}  # rows of batches to come
            assert {homes_of([table], [key], case.settings.topology)[0] for table, key in rest.rows} <= {rank}
    rows, requests = bytes_needed(case, outcome)
    assert outcome.posted == rows + requests
    planned = Counter[tuple[int, int]]()
    for plan in outcome.plans:
        pairs = zip(plan.moves.source.tolist(), plan.moves.target.tolist(), strict=True)
        for pair, size in zip(pairs, plan.moves.num_bytes.tolist(), strict=True):
            planned[pair] += size
    assert planned == rows  # plans that count rows count what is sent
    without = Scheduler(case.settings, case.id_batches())
    without.count_no_rows()
    for plan in outcome.plans:
        assert without.fill()
        assert np.array_equal(plan.worker, without.plan().worker)


def bytes_needed(case: Case, outcome: Outcome) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, int]]]:
    """The bytes between ranks: values and gradients of rows; numbers of rows and their keys."""
    topology = case.settings.topology
    found, requests = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    table_of = {name: number for number, table in enumerate(case.tables) for name in table.feature_names}
    for samples, worker in zip(case.batches, outcome.workers, strict=True):
        for rank in range(topology.num_workers):
            part = samples.take(np.flatnonzero(worker == rank))
            features = np.repeat(part.features, part.lengths.sum(axis=1))
            rows = {(table_of[name], int(key)) for name, key in zip(features, part.values, strict=True)}
            for home in set(range(topology.num_workers)) - {rank}:
                requests[rank, home] += 8 * len(case.tables)
                for table, key in rows:
                    if homes_of([table], [key], topology)[0] == home:
                        requests[rank, home] += 8
                        found[rank, home] += case.settings.sizes.values[table]
                        found[home, rank] += case.settings.sizes.values[table]
    return found, requests


@settings(max_examples=25, derandomize=True, phases=NO_SHRINKING)
@given(at_home_cases())
def test_a_cluster_trains_what_one_process_trains(case: Case) -> None:
    check(case, run_cluster(case))


@pytest.mark.slow
@settings(max_examples=150, derandomize=True, phases=NO_SHRINKING)
@given(at_home_cases())
def test_many_clusters_train_what_one_process_trains(case: Case) -> None:
    check(case, run_cluster(case))
