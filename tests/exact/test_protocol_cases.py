"""The nasty cases of the protocol, each written down so that it occurs, and seen in the plan to do so."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from in_process_cluster import run_cluster
from scripted_cases import (
    EVICT,
    GRADIENT,
    PEER,
    PULL,
    RECORD,
    STORE,
    UPDATE,
    VALUES,
    evictions,
    is_early,
    moves_of,
    run_exactly,
    script,
    steps_of,
)
from training_case import FIRST

from rowhaul.schedule.row_states import State

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rests", [False, True])
def test_a_split_row_whose_base_is_a_peer(optimizer: str, rests: bool) -> None:
    pause = [{}] if rests else []
    case = script(
        {0: "x"}, {1: "x", 2: "x"}, *pause, {0: "x"}, {0: "xy", 1: "xy"}, {2: "xy"},
        peer_to_peer=True, optimizer=optimizer,
    )  # fmt: skip
    plans = run_exactly(case).plans
    _, _, *_, gathered, _, _ = plans
    assert plans[1].states.tolist() == [State.OWNED]
    if optimizer != "sgd":
        assert moves_of(plans[1], "x") == {(PEER, RECORD, 0, 1), (PEER, VALUES, 0, 2)}
    assert moves_of(gathered, "x") == {(PEER, GRADIENT, 2, 1), (PEER, RECORD, 1, 0)}
    assert steps_of(gathered, "x") == [(1, {1, 2}, 1)]
    assert is_early(gathered, "x") == rests


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_member_is_evicted_before_the_step(optimizer: str) -> None:
    case = script(
        {0: "x", 1: "x"}, {0: "y"}, {2: "x"}, {0: "x", 1: "x"},
        capacity=1, optimizer=optimizer, segments=(2, None),
    )  # fmt: skip
    outcome = run_exactly(case)
    plans = outcome.plans
    assert [rests[0].waiting for rests in outcome.rests] == [
        set(), {("cache", 1, 0, ord("x"))}, set(), {("home", 0, 0, ord("x"))},
    ]  # fmt: skip
    assert moves_of(plans[1], "x") == {(EVICT, GRADIENT, 0, STORE)}
    assert steps_of(plans[1], "x") == []
    assert moves_of(plans[2], "x") == {(UPDATE, GRADIENT, 1, STORE), (PULL, RECORD, STORE, 2)}
    assert steps_of(plans[2], "x") == [(STORE, {0, 1}, 0)]


def test_a_member_that_holds_the_base_is_evicted_before_the_step() -> None:
    case = script({0: "x"}, {0: "x", 1: "x"}, {0: "y"}, {2: "x"}, {2: "x"}, capacity=1, peer_to_peer=True)
    plans = run_exactly(case).plans
    assert moves_of(plans[2], "x") == {(EVICT, RECORD | GRADIENT, 0, STORE)}
    assert moves_of(plans[3], "x") == {(UPDATE, GRADIENT, 1, STORE), (PULL, RECORD, STORE, 2)}
    assert steps_of(plans[3], "x") == [(STORE, {0, 1}, 1)]


def test_a_member_is_evicted_and_the_base_stays_with_a_peer() -> None:
    case = script({0: "x"}, {0: "x", 1: "x"}, {1: "y"}, {2: "x"}, {2: "x"}, capacity=1, peer_to_peer=True)
    plans = run_exactly(case).plans
    assert moves_of(plans[2], "x") == {(EVICT, GRADIENT, 1, STORE)}
    assert moves_of(plans[3], "x") == {(UPDATE, RECORD | GRADIENT, 0, STORE), (PULL, RECORD, STORE, 2)}
    assert steps_of(plans[3], "x") == [(STORE, {0, 1}, 1)]


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("rests", [False, True])
def test_an_evict_push_and_the_pull_of_the_same_row_in_the_next_iteration(slow: int, rests: bool) -> None:
    """The pull may be made early only if the row has rested since: else it would overtake the push."""
    pause = [{}] if rests else []
    case = script({0: "x"}, {0: "y"}, *pause, {1: "x"}, {2: "xy"}, capacity=(1, 2, 2), look_ahead=4)
    plans = run_exactly(case, delay=slow_turns(slow)).plans
    assert moves_of(plans[1], "x") == {(EVICT, RECORD, 0, STORE)}
    assert moves_of(plans[-2], "x") == {(PULL, RECORD, STORE, 1)}
    assert is_early(plans[-2], "x") == rests


@pytest.mark.parametrize("rests", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_workers_evict_the_same_split_row_in_one_iteration(rests: bool, optimizer: str) -> None:
    pause = [{}] if rests else []
    case = script(
        {0: "x", 1: "x"}, {0: "y", 1: "z"}, *pause, {2: "x"}, {0: "x"}, capacity=1, optimizer=optimizer
    )
    plans = run_exactly(case).plans
    assert moves_of(plans[1], "x") == {(EVICT, GRADIENT, 0, STORE), (EVICT, GRADIENT, 1, STORE)}
    assert steps_of(plans[1], "x") == [(STORE, {0, 1}, 0)]
    assert moves_of(plans[-2], "x") == {(PULL, RECORD, STORE, 2)}
    assert is_early(plans[-2], "x") == rests


def test_two_of_three_evict_the_same_split_row_and_the_third_follows() -> None:
    case = script({0: "x", 1: "x", 2: "x"}, {0: "y", 2: "z"}, {1: "w"}, {0: "x"}, capacity=1)
    plans = run_exactly(case).plans
    assert moves_of(plans[1], "x") == {(EVICT, GRADIENT, 0, STORE), (EVICT, GRADIENT, 2, STORE)}
    assert moves_of(plans[2], "x") == {(EVICT, GRADIENT, 1, STORE)}
    assert steps_of(plans[2], "x") == [(STORE, {0, 1, 2}, 0)]


@pytest.mark.parametrize("rests", [False, True])
def test_a_gatherer_that_itself_leaves_the_row(rests: bool) -> None:
    pause = [{}] if rests else []
    case = script(
        {0: "x"}, {0: "x", 1: "x"}, *pause, {0: "y", 2: "x"}, {1: "x"}, {0: "x"},
        capacity=1, peer_to_peer=True,
    )  # fmt: skip
    plans = run_exactly(case).plans
    gathered = plans[-3]
    assert moves_of(gathered, "x") == {(PEER, GRADIENT, 1, 0), (PEER, RECORD, 0, 2)}
    assert steps_of(gathered, "x") == [(0, {0, 1}, 1)]
    assert (0, "x") in evictions(gathered)
    assert is_early(gathered, "x") == rests


@pytest.mark.parametrize("first_touch", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fresh_row_trained_by_several(first_touch: bool, optimizer: str) -> None:
    case = script(
        {0: "x", 1: "x", 2: "x"}, {1: "x"}, {0: "x", 2: "x"}, optimizer=optimizer, first_touch=first_touch
    )
    plans = run_exactly(case).plans
    assert plans[0].states.tolist() == [State.FRESH if first_touch else State.HOME]
    assert len(plans[0].moves) == (0 if first_touch else 3)
    assert steps_of(plans[1], "x") == [(STORE, {0, 1, 2}, 0)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_split_rows_of_different_iterations_are_stepped_in_one_turn(optimizer: str) -> None:
    """Each with the learning rate, and for Adam the number, of the iteration that trained it."""
    case = script({0: "x", 1: "x"}, {0: "y", 1: "y"}, {}, {2: "xy"}, optimizer=optimizer)
    plans = run_exactly(case).plans
    assert steps_of(plans[3], "x") == [(STORE, {0, 1}, 0)]
    assert steps_of(plans[3], "y") == [(STORE, {0, 1}, 1)]
    assert is_early(plans[3], "x")
    assert is_early(plans[3], "y")


@pytest.mark.parametrize("peer_to_peer", [False, True])
def test_a_row_that_one_owns_is_then_trained_by_all_again_and_again(peer_to_peer: bool) -> None:
    everyone = {0: "x", 1: "x", 2: "x"}
    case = script({1: "x"}, everyone, everyone, everyone, {1: "x"}, {1: "x"}, peer_to_peer=peer_to_peer)
    plans = run_exactly(case).plans
    assert plans[1].states.tolist() == [State.OWNED]
    assert [plan.states.tolist() for plan in plans[2:5]] == [[State.SPLIT]] * 3
    assert [steps_of(plan, "x")[0][1] for plan in plans[2:5]] == [{0, 1, 2}] * 3


@pytest.mark.parametrize("sync", ["on-demand", "full", "static", "bounded:0"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hot_rows_trained_by_one_by_all_and_by_nobody(sync: str, optimizer: str) -> None:
    everyone = {0: "hx", 1: "h", 2: "hx"}
    case = script({1: "h"}, everyone, {0: "x"}, {2: "hg"}, everyone, hot="gh", optimizer=optimizer, sync=sync)
    plans = run_exactly(case).plans
    assert [plan.all_reduce_rows for plan in plans] == [1, 1, 0, 2, 1]
    assert all(not moves_of(plan, "h") for plan in plans)


def test_a_worker_with_no_share_still_holds_rows_that_others_need() -> None:
    case = script(
        {2: "xy"}, {1: "y", 2: "y"}, {0: "x"}, {1: "y"}, {0: "xy", 1: "xy"},
        decisions={FIRST: (("shares", (1, 1, 0)),)}, left_out={2: 2},
    )  # fmt: skip
    plans = run_exactly(case).plans
    assert [len(plan.worker) for plan in plans] == [3, 3, 2, 2, 2]
    assert plans[2].controls[0].value == (1, 1, 0)
    assert moves_of(plans[2], "x") == {(UPDATE, RECORD, 2, STORE), (PULL, RECORD, STORE, 0)}
    assert (UPDATE, GRADIENT, 2, STORE) in moves_of(plans[3], "y")


SCRIPT = (
    {0: "x", 1: "xy"},
    {0: "yz", 2: "x"},
    {1: "z", 2: "z"},
    {0: "x"},
    {},
    {0: "y", 1: "x", 2: "xz"},
    {0: "z"},
)


@pytest.mark.parametrize("sync", ["on-demand", "full", "static", "bounded:0", "bounded:2"])
@pytest.mark.parametrize("colocated", [False, True])
def test_where_segments_end_does_not_matter(sync: str, colocated: bool) -> None:
    case = script(*SCRIPT, sync=sync, colocated=colocated, capacity=2)
    whole = run_cluster(case)
    drained = run_cluster(replace(case, segments=(1,) * len(SCRIPT)))
    assert whole.losses == drained.losses
    rows, others = whole.rows(), drained.rows()
    assert rows.keys() == others.keys()
    assert all(np.array_equal(rows[row], others[row]) for row in rows)
    if sync in ("on-demand", "bounded:2"):
        assert any(rest.waiting for rests in drained.rests for rest in rests), (
            "something is pending at an end"
        )


@pytest.mark.parametrize("segments", [(1, 1, 1, None), (3, None), (2, 0, 2, None), (7, None), (9,)])
@pytest.mark.parametrize("sync", ["on-demand", "full"])
def test_segments_that_end_with_pushes_pending(segments: tuple[int | None, ...], sync: str) -> None:
    run_exactly(script(*SCRIPT, segments=segments, sync=sync, capacity=2))


def slow_turns(slow: int):
    """One rank sends and receives late."""

    def delay(rank: int, phase: str) -> None:
        if rank == slow and phase == "turn":
            time.sleep(0.005)

    return delay
