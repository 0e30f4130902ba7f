"""Pruned rows on a cluster: chunks, records and decisions are those of one process, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from exact_cases import cases
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from in_process_cluster import run_cluster
from pruned_alone import TrainedAlone
from pruned_cluster import PrunedRank, check_close, check_pruned
from pruned_oracle import LEAST_ENTRIES, PrunedOracle
from training_case import Case

from rowhaul.pruning import PruneSettings
from rowhaul.pruning.scheduling import SimulatedPruning
from rowhaul.schedule import RowSizes
from rowhaul.train.distributed.tables import layout_of, only_collection
from slow_cases import mostly_slow

# Kernels may compile while a case is drawn, and others may be at work: that says nothing of the case.
few = settings(
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def prunings(draw: st.DrawFn, dim: int, utility: str) -> PruneSettings:
    """How rows are pruned: often, and much."""
    chunks = draw(st.integers(1, dim))
    return PruneSettings(
        ratio=draw(st.sampled_from([0.5, 0.75, 0.9, 0.3])),
        chunks=chunks,
        period=draw(st.sampled_from([2, 3, 1, 4])),
        decay=draw(st.sampled_from([0.9, 0.5, 1.0])),
        sample=draw(st.sampled_from([100_000, 8])),
        enforcement=draw(st.sampled_from([0.0, 0.05, 0.5])),
        utility=utility,
        ratios=draw(st.sampled_from(["adaptive", "adaptive", "linear", "power"])),
        dims=draw(st.sampled_from([0, 0, max(chunks, dim - 1)])),
        cold_start=draw(st.sampled_from([2, 3, 5])),
        two_dimensions=draw(st.booleans()),
    )


@st.composite
def pruned_cases(
    draw: st.DrawFn, sync: str, peer_to_peer: bool, *, utility: str = "access", undecided: bool = False
) -> Case:
    """A case of the exact tests, its tables of one row size, with pruning and none of what that excludes."""
    case = draw(cases(sync, peer_to_peer, undecided=undecided))
    dim = draw(st.integers(1, 3))
    tables = tuple(replace(table, embedding_dim=dim) for table in case.tables)
    return as_pruned(replace(case, tables=tables), draw(prunings(dim, utility)))


def as_pruned(case: Case, pruning: PruneSettings) -> Case:
    """A case with pruned rows; its caches hold any batch, and a few chunks more."""
    case = replace(case, pruning=pruning)
    sizes = layout_of(only_collection(case.model())).sizes()
    settings = replace(
        case.settings,
        topology=replace(case.settings.topology, tables_per_row=pruning.chunks),
        sizes=sizes,
        hot=None,
        policies=(),
        cache=replace(case.settings.cache, capacity=_most(case, sizes)),
    )
    return replace(case, settings=settings)


def _most(case: Case, sizes: RowSizes) -> int:
    per_row = case.pruning.chunks if case.settings.cache.unit == "rows" else sum(sizes.records)
    rows = max(
        len(set(zip(one.tables.tolist(), one.keys.tolist(), strict=True))) for one in case.id_batches()
    )
    return max(rows, 1) * per_row + 1


WAYS = mostly_slow([("on-demand", False), ("on-demand", True), ("full", False)], ("on-demand", False))


def check_against_one_process(case: Case) -> None:
    """Replayed in the workers' parts to the bit, and trained by itself up to rounding: the same chunks."""
    outcome = run_cluster(case, kind=PrunedRank)
    assert len(outcome.plans) == len(case.batches)
    ends = {rest.iteration for rest in outcome.rests[0]}
    check_pruned(case, outcome, TrainedAlone(case).run(ends, outcome.workers))
    if case.dtype is torch.float64:
        check_close(case, outcome, TrainedAlone(case).run(ends))


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "peer_to_peer"), WAYS)
@settings(few, max_examples=6)
@given(data=st.data())
def test_a_cluster_keeps_the_chunks_of_one_process(sync, peer_to_peer, data):
    torch.set_num_threads(1)
    check_against_one_process(data.draw(pruned_cases(sync, peer_to_peer)))


@pytest.mark.slow
@settings(few, max_examples=4)
@given(data=st.data())
def test_rows_are_pruned_early_when_training_begins(data):
    """In a period longer than the data: ranks look whether it is time, and mostly find that it is not."""
    torch.set_num_threads(1)
    case = data.draw(pruned_cases("on-demand", False))
    case = as_pruned(case, replace(case.pruning, period=data.draw(st.sampled_from([12, 25, 100]))))
    check_against_one_process(case)


@pytest.mark.parametrize(("sync", "peer_to_peer"), WAYS)
@settings(few, max_examples=3)
@given(data=st.data())
def test_a_cluster_prunes_by_gradients_as_reported(sync, peer_to_peer, data):
    torch.set_num_threads(1)
    case = data.draw(pruned_cases(sync, peer_to_peer, utility="gradient"))
    case = as_pruned(case, replace(case.pruning, dims=0, two_dimensions=False))
    outcome = run_cluster(case, kind=PrunedRank)
    ends = {rest.iteration for rest in outcome.rests[0]}
    check_pruned(case, outcome, PrunedOracle(case).run(outcome.workers, ends))


@settings(few, max_examples=4)
@given(data=st.data())
def test_the_simulator_plans_what_a_cluster_does(data):
    """Ids are all it takes."""
    torch.set_num_threads(1)
    case = data.draw(pruned_cases("on-demand", False, undecided=True))
    outcome = run_cluster(case, kind=PrunedRank)
    layout = layout_of(only_collection(case.model()))
    simulated = SimulatedPruning(case.settings, layout, case.id_batches(), LEAST_ENTRIES)
    for plan in outcome.plans:
        assert simulated.fill()
        found = simulated.plan()
        num_home = len(found.moves) - len(plan.moves)  # of rows that go home to be narrowed
        assert num_home >= 0
        for name, column in vars(plan.moves).items():
            assert np.array_equal(getattr(found.moves, name)[num_home:], column), name
        assert np.array_equal(found.worker, plan.worker)
