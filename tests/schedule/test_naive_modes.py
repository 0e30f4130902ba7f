"""The oracle itself, by hand: the other synchronisations, when moves may travel, and what caches give up."""

from __future__ import annotations

import pytest
from naive import NaiveMove
from naive_examples import EVICT, PULL, STORE, UPDATE, D, S, X, Y, Z, moved, play, ready

from rowhaul.schedule.row_states import State


class TestModes:
    def test_full_pushes_at_once(self):
        oracle, plans = play({0: "xy", 1: "y"}, {0: "xy"}, sync="full")
        assert moved(plans[0]) == [
            (UPDATE, X, 0, STORE, D + S),
            (UPDATE, Y, 0, STORE, D),
            (UPDATE, Y, 1, STORE, D),
        ]
        assert plans[1].states == {X: State.HOME, Y: State.HOME}
        assert plans[1].hits == [1, 0, 0]
        assert moved(plans[1]) == [
            (PULL, Y, STORE, 0, D + S),
            (UPDATE, X, 0, STORE, D + S),
            (UPDATE, Y, 0, STORE, D + S),
        ]
        assert oracle.entries[Y].latest == {0}

    def test_without_look_ahead_on_demand_is_full(self):
        iterations = ({0: "xy", 1: "yz"}, {0: "x", 1: "xz"}, {2: "yz"}, {0: "z", 1: "x"})
        _, on_demand = play(*iterations, capacity=(2, 2, 2), look_ahead=0)
        _, full = play(*iterations, capacity=(2, 2, 2), look_ahead=0, sync="full")
        assert on_demand == full

    def test_bounded_by_zero_is_full_when_there_is_no_state(self):
        iterations = ({0: "xy", 1: "yz"}, {0: "x", 1: "xz"}, {2: "yz"}, {0: "z", 1: "x"}, {0: "xy", 2: "yz"})
        for policy in ("lru", "emark"):
            _, bounded = play(*iterations, capacity=(2, 2, 2), sync="bounded:0", state=(0,), policy=policy)
            _, full = play(*iterations, capacity=(2, 2, 2), sync="full", state=(0,), policy=policy)
            assert bounded == full

    def test_bounded_keeps_updates_back(self):
        oracle, plans = play(*[{0: "x"}] * 4, sync="bounded:2")
        assert [moved(plan) for plan in plans] == [[], [], [(UPDATE, X, 0, STORE, D)], []]
        assert [plan.hits[0] for plan in plans] == [0, 1, 1, 1]
        assert [plan.states[X] for plan in plans] == [State.FRESH] + [State.HOME] * 3
        assert (oracle.versions[X], oracle.copies[0][X].seen, oracle.copies[0][X].pending) == (3, 3, 1)

    def test_bounded_copy_catches_up_when_it_is_too_far_behind(self):
        # Worker 0's third update takes the home to version 3, two too far for worker 1 and its one pending.
        oracle, plans = play({0: "x", 1: "x"}, {0: "x"}, {0: "x"}, {1: "x"}, {2: "x"}, sync="bounded:2")
        assert moved(plans[2]) == [(UPDATE, X, 0, STORE, D)]
        assert moved(plans[3]) == [(PULL, X, STORE, 1, D + S), (UPDATE, X, 1, STORE, D)]
        assert plans[3].hits == [0, 0, 0]
        assert oracle.copies[1][X].seen == 4
        assert moved(plans[4]) == [(PULL, X, STORE, 2, D + S)]
        assert (oracle.versions[X], oracle.copies[0][X].seen) == (4, 3)

    def test_bounded_eviction_hands_over_what_is_pending(self):
        oracle, plans = play({0: "x"}, {0: "y"}, {0: "x"}, sync="bounded:2", capacity=(1, 1, 1))
        assert moved(plans[1]) == [(EVICT, X, 0, STORE, D)]
        assert moved(plans[2]) == [(PULL, X, STORE, 0, D + S), (EVICT, Y, 0, STORE, D)]
        assert oracle.copies[0][X].seen == 1

    def test_static_keeps_only_the_hot_set(self):
        _, plans = play({0: "xyz", 1: "xz"}, {0: "xyz", 1: "xz"}, sync="static", hot=frozenset({X}))
        assert moved(plans[0]) == [
            (UPDATE, Y, 0, STORE, D + S),
            (UPDATE, Z, 0, STORE, D),
            (UPDATE, Z, 1, STORE, D),
        ]
        assert moved(plans[1]) == [
            (PULL, Y, STORE, 0, D + S),
            (PULL, Z, STORE, 0, D),
            (PULL, Z, STORE, 1, D),
            *moved(plans[0]),
        ]
        assert plans[1].hits == [1, 1, 0]
        assert plans[1].all_reduce_rows == 1

    def test_colocated_home_moves_nothing_for_its_own_worker(self):
        _, plans = play({0: "x", 1: "x"}, {0: "x"}, {1: "x"}, home=lambda row: 1, first_touch=False)
        assert moved(plans[0]) == [(PULL, X, 1, 0, D)]
        assert moved(plans[1]) == [(PULL, X, 1, 0, D + S), (UPDATE, X, 0, 1, D)]
        assert moved(plans[2]) == [(UPDATE, X, 0, 1, D + S)]
        assert [plan.hits for plan in plans] == [[0, 0, 0]] * 3


class TestReady:
    def test_row_at_rest_travels_as_early_as_the_window_shows_it(self):
        _, plans = play({0: "x"}, {0: "y"}, {0: "y"}, {0: "y"}, {1: "x"}, look_ahead=3)
        assert ready(plans[4]) == {1}
        _, plans = play({0: "x"}, {0: "y"}, {0: "y"}, {0: "y"}, {1: "x"}, look_ahead=2)
        assert ready(plans[4]) == {2}

    def test_row_of_the_last_iteration_is_late(self):
        _, plans = play({0: "x"}, {1: "x"}, look_ahead=3)
        assert ready(plans[1]) == {1}

    def test_row_never_touched_travels_with_the_window(self):
        _, plans = play({0: "x"}, {0: "y"}, {0: "z"}, look_ahead=2, first_touch=False)
        assert [ready(plan) for plan in plans] == [{0}, {0}, {0}]

    def test_evicted_row_is_late_and_counts_as_touched(self):
        _, plans = play({0: "x"}, {0: "y"}, {0: "y"}, {1: "x"}, look_ahead=3, capacity=(1, 1, 1))
        assert ready(plans[1]) == {1}
        assert ready(plans[3]) == {2}

    def test_pushes_of_full_sync_are_late(self):
        _, plans = play({0: "x"}, {0: "y"}, {1: "x"}, look_ahead=2, sync="full")
        assert [ready(plans[0]), ready(plans[1])] == [{0}, {1}]
        assert plans[2].moves.keys() == {
            NaiveMove(PULL, *X, STORE, 1, D + S, ready=1),
            NaiveMove(UPDATE, *X, 1, STORE, D + S, ready=2, after=True),
        }

    def test_bounded_pull_waits_for_pushes_of_the_same_iteration(self):
        _, plans = play(
            {0: "x", 1: "x"}, {0: "x"}, {0: "y"}, {0: "y"}, {1: "x", 2: "x"}, look_ahead=3, sync="bounded:1"
        )
        assert plans[4].moves.keys() >= {
            NaiveMove(UPDATE, *X, 1, STORE, D, ready=4),
            NaiveMove(PULL, *X, STORE, 1, D + S, ready=4),
            NaiveMove(PULL, *X, STORE, 2, D + S, ready=4),
        }


class TestCaches:
    """The victims, chosen with room for two rows of three."""

    @pytest.mark.parametrize(
        ("policy", "iterations", "victim"),
        [
            ("lru", [{0: "x"}, {0: "y"}, {0: "x"}, {0: "z"}], Y),
            ("lfu", [{0: "x"}, {0: "x"}, {0: "y"}, {0: "z"}], Y),
            ("lfu", [{0: "x"}, {0: "y"}, {0: "z"}], X),
            # X was used last, but worker 1 has trained it since.
            ("emark", [{0: "y"}, {0: "x"}, {1: "x"}, {0: "z"}], X),
            ("emark:frequency,mark,latest", [{0: "y"}, {0: "x"}, {0: "x"}, {1: "x"}, {0: "z"}], Y),
            # Both marks are 1 when the cache is full, so that Y's becomes 2; X was used more often.
            ("emark", [{0: "x"}, {0: "x"}, {0: "x"}, {0: "y"}, {0: "y"}, {0: "z"}], X),
            ("belady", [{0: "x"}, {0: "y"}, {0: "z"}, {0: "x"}], Y),
            ("lru", [{0: "x"}, {0: "y"}, {0: "z"}, {0: "x"}], X),
        ],
    )
    def test_victim(self, policy, iterations, victim):
        _, plans = play(*iterations, capacity=(2, 2, 2), policy=policy)
        assert next(plan.evicted[0] for plan in plans if plan.evicted[0]) == {victim}

    def test_belady_keeps_what_is_needed_sooner(self):
        _, plans = play(
            {0: "xy"}, {0: "z"}, {0: "x"}, {0: "y"}, capacity=(2,) * 3, policy="belady", look_ahead=2
        )
        assert plans[1].evicted[0] == {Y}

    def test_bytes(self):
        _, plans = play({0: "xy"}, {0: "z"}, capacity=(3 * (D + S) - 1,) * 3, unit="bytes")
        assert plans[1].evicted[0] == {X}
