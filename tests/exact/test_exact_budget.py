"""Rows within a budget on a cluster: rows, losses and who has what are those of one process."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import budget_cluster
import numpy as np
import pytest
import torch
from budget_alone import train_alone, train_collection
from budget_cluster import BudgetRank, scored_batches
from cluster_checks import check_bytes, check_memory
from exact_cases import cases, most_capacity, with_capacity
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from in_process_cluster import Outcome, run_cluster
from oracles import assert_bit_equal, assert_close
from training_case import Case

from rowhaul.budget import BudgetSettings
from rowhaul.budget.room import least_bytes
from rowhaul.budget.scheduling import SimulatedBudget, SlotScheduler, staying_hot
from rowhaul.errors import CacheTooSmallError
from rowhaul.schedule import HotRows, Plan
from rowhaul.train.distributed.tables import layout_of, only_collection
from slow_cases import mostly_slow

# Kernels may compile while a case is drawn, and others may be at work: that says nothing of the case.
few = settings(
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
NAMES = (-1, -2, 0, 1, 3, 5, 6, 7, -3, 8)  # of rows, shared ones and slots


@st.composite
def budgets(draw: st.DrawFn, case: Case) -> BudgetSettings:
    """A budget for a few slots, most of them wanted by several ids, that are given away often."""
    shared = draw(st.sampled_from([0.04, 0.2, 0.5]))
    sizes, dims = case.settings.sizes, [table.embedding_dim for table in case.tables]
    least = 0
    for dim in set(dims):
        num_bytes = least_bytes(BudgetSettings(1, shared), sizes.records[dims.index(dim)], dims.count(dim))
        least = max(least, math.ceil(num_bytes * sum(dims) / (dim * dims.count(dim))) + len(dims))
    return BudgetSettings(
        math.ceil(least * draw(st.sampled_from([1.0, 1.3, 2.0, 4.0]))),
        shared,
        draw(st.sampled_from([0.999, 0.5, 0.9, 1.0])),
        draw(st.sampled_from([1, 2, 3, 100])),
        case.row_dtype,
    )


@st.composite
def hot_sets(draw: st.DrawFn, num_tables: int) -> HotRows:
    row = st.tuples(st.integers(0, num_tables - 1), st.sampled_from(NAMES))
    rows = sorted(draw(st.sets(row, max_size=6)))
    return HotRows(np.array([row[0] for row in rows]), np.array([row[1] for row in rows]))


@st.composite
def budget_cases(
    draw: st.DrawFn, sync: str, peer_to_peer: bool, *, undecided: bool = False, hot: bool = False
) -> Case:
    """A case of the exact tests with a budget, and none of what that excludes."""
    row_dtype = draw(st.sampled_from(["float32", "float32", "float32", "int8", "bfloat16"]))
    case = draw(cases(sync, peer_to_peer, undecided=undecided or hot, row_dtype=row_dtype))
    case = replace(case, settings=replace(case.settings, policies=(), hot=None))
    case = with_capacity(replace(case, pruning=draw(budgets(case))), most_capacity(case))
    if hot:
        num_tables = len(case.tables)
        case = replace(
            case,
            settings=replace(case.settings, hot=draw(hot_sets(num_tables))),
            replicated=tuple(draw(st.none() | hot_sets(num_tables)) for _ in case.segments[:-1]),
        )
    if case.decisions or case.replicated:
        return case
    for share in (0.4, 0.6, 0.8):
        less = with_capacity(case, round(share * most_capacity(case)))
        if _can_be_planned(less):
            return less
    return case


def _can_be_planned(case: Case) -> bool:
    try:
        simulated(case)
    except CacheTooSmallError:
        return False
    return True


def simulated(case: Case) -> tuple[list[Plan], SimulatedBudget]:
    """What the simulator plans, from ids alone."""
    layout = layout_of(only_collection(case.model()))
    scheduler, plans = SimulatedBudget(case.settings, layout, case.id_batches()), []
    while scheduler.fill():
        plans.append(scheduler.plan())
    return plans, scheduler


WAYS = mostly_slow([("on-demand", False), ("on-demand", True), ("full", False)], ("on-demand", False))


def check_against_one_process(case: Case) -> Outcome:
    """Replayed in the workers' parts to the bit, and trained by itself up to rounding."""
    budget_cluster.everyone.clear()
    outcome = run_cluster(case, kind=BudgetRank)
    assert len(outcome.plans) == len(case.batches)
    for jobs in outcome.jobs[1:]:
        assert [job.plan.digest() for job in jobs] == [plan.digest() for plan in outcome.plans]
    check_bytes(outcome)
    check_memory(case, outcome)
    ends = [rest.iteration for rest in outcome.rests[0]]
    assert_bit_equal(case, outcome, train_alone(case, ends, outcome.workers))
    if case.dtype is torch.float64:
        assert_close(case, outcome, train_alone(case, ends))
    if case.row_dtype == "float32":  # gradients that are sent are rounded
        check_collection(case, outcome, ends)
    handed_over = sum((one.handed_over for one in budget_cluster.everyone), Counter())
    for rank in budget_cluster.everyone:
        assert rank.noted_bytes == handed_over.total()
    return outcome


def check_collection(case: Case, outcome: Outcome, ends: list[int]) -> None:
    """An ordinary collection holds the same rows, to the bit, and scores samples alike, unknown ids too."""
    alone = train_collection(case, ends, outcome.workers, scored_batches(case))
    for segment, rows in enumerate(alone.rows):
        found = outcome.rows(segment)
        assert rows.keys() <= found.keys()  # replicated rows may not exist at all
        assert all(np.array_equal(found[row], record) for row, record in rows.items())
        scores: dict[int, float] = {}
        for rank in budget_cluster.everyone:
            scores |= rank.scores[segment]
        assert scores == alone.scores[segment]


@pytest.mark.parametrize(("sync", "peer_to_peer"), WAYS)
@settings(few, max_examples=5)
@given(data=st.data())
def test_a_cluster_trains_the_rows_of_one_process(sync, peer_to_peer, data):
    torch.set_num_threads(1)
    check_against_one_process(data.draw(budget_cases(sync, peer_to_peer)))


@pytest.mark.parametrize(("sync", "peer_to_peer"), WAYS)
@settings(few, max_examples=3)
@given(data=st.data())
def test_hot_rows_leave_the_set_before_they_change_hands(sync, peer_to_peer, data):
    torch.set_num_threads(1)
    check_against_one_process(data.draw(budget_cases(sync, peer_to_peer, hot=True)))


@settings(few, max_examples=3)
@given(data=st.data())
def test_the_simulator_moves_what_a_cluster_does(data):
    """Of every plan, and of what changes hands between them."""
    torch.set_num_threads(1)
    case = data.draw(budget_cases("on-demand", data.draw(st.booleans()), undecided=True))
    hot = data.draw(st.none() | hot_sets(len(case.tables)))
    case = with_capacity(replace(case, settings=replace(case.settings, hot=hot)), most_capacity(case))
    outcome = check_against_one_process(case)
    plans, scheduler = simulated(case)
    between = sum(int(moves.num_bytes.sum()) for moves in scheduler._sent)  # at a stop after the last plan
    for plan, found in zip(outcome.plans, plans, strict=True):
        num_before = len(found.moves) - len(plan.moves)
        between += int(found.moves.num_bytes[:num_before].sum())
        for name, column in vars(plan.moves).items():
            assert np.array_equal(getattr(found.moves, name)[num_before:], column), name
        assert np.array_equal(found.worker, plan.worker)
    for rank in budget_cluster.everyone:
        assert rank.noted_bytes == between


@settings(few, max_examples=5)
@given(data=st.data())
def test_a_scheduler_goes_on_from_a_state(data):
    """Wherever it is saved: before, between and after batches that are read ahead, and at stops."""
    case = data.draw(budget_cases("on-demand", False, undecided=True))
    hot = data.draw(st.none() | hot_sets(len(case.tables)))
    case = with_capacity(replace(case, settings=replace(case.settings, hot=hot)), most_capacity(case))
    layout, batches = layout_of(only_collection(case.model())), list(case.id_batches())
    scheduler, plans = SlotScheduler(case.settings, layout, batches), []
    while True:
        while not scheduler.fill() and scheduler.ids.must_wait:
            staying = staying_hot(scheduler.settings.hot, scheduler.decide())
            if staying is not None:
                scheduler.replicate(staying)
            scheduler.hand_over()
        if data.draw(st.booleans()):
            again = SlotScheduler(scheduler.settings, layout, batches[len(plans) :])
            again.restore(scheduler.export())
            scheduler = again  # whose plans must be those of a scheduler that was never saved
        if not scheduler.fill():
            break
        plans.append(scheduler.plan())
    expected, _ = simulated(case)
    for plan, one in zip(plans, expected, strict=True):
        first = len(one.moves) - len(plan.moves)  # of those that follow what has changed hands
        moves = one.moves.some(np.arange(len(one.moves)) >= first)
        assert plan.digest() == replace(one, moves=moves).digest()
