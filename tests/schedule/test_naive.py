"""The oracle itself, pinned by examples that were worked out by hand: one for each line of the table."""

from __future__ import annotations

import dataclasses

import pytest
from naive import Naive, NaiveMove, NaivePlan, NaiveSettings, Row
from naive_modes import naive_scheduler

from rowhaul.schedule.directory.states import State
from rowhaul.schedule.plan import Kind

PULL, UPDATE, EVICT, PEER = Kind.MISS_PULL, Kind.UPDATE_PUSH, Kind.EVICT_PUSH, Kind.PEER_SEND
D, S = 8, 4  # bytes of values and of optimizer state
STORE = 9  # the rank of the one store
X, Y, Z = (0, 1), (0, 2), (0, 3)

Needs = dict[int, str]  # worker: the rows of its one sample, spelled "xyz"


def play(*iterations: Needs, **settings: object) -> tuple[Naive, list[NaivePlan]]:
    """Run these iterations with one sample per worker; all cached rows fit unless told otherwise."""
    defaults = NaiveSettings(num_workers=3, home=lambda row: STORE, values=(D,), state=(S,), look_ahead=1)
    batches = [
        [[(0, "xyz".index(name) + 1) for name in rows] for rows in needs.values()] for needs in iterations
    ]
    oracle = naive_scheduler(
        dataclasses.replace(defaults, **settings), batches, [list(needs) for needs in iterations]
    )
    return oracle, [oracle.plan() for _ in iterations]


def moved(plan: NaivePlan) -> list[tuple[Kind, Row, int, int, int]]:
    """(kind, row, source, target, bytes), in order."""
    return sorted(
        (move.kind, (move.table, move.key), move.source, move.target, move.num_bytes)
        for move in plan.moves.elements()
    )


def ready(plan: NaivePlan) -> set[int]:
    return {move.ready for move in plan.moves}


class TestStates:
    def test_fresh_rows_are_made_by_all_who_train_them(self):
        oracle, (plan,) = play({0: "x", 1: "xy"})
        assert plan.states == {X: State.FRESH, Y: State.FRESH}
        assert not plan.moves
        assert (plan.lookups, plan.hits) == ([1, 2, 0], [0, 0, 0])
        assert oracle.entries[Y].state == State.OWNED
        assert oracle.entries[Y].latest == {1}
        assert oracle.entries[X].state == State.SPLIT
        assert (oracle.entries[X].partial, oracle.entries[X].base) == ({0, 1}, set())

    def test_home_row_is_pulled_whole_by_a_sole_trainer(self):
        _, (plan,) = play({2: "x"}, first_touch=False)
        assert plan.states == {X: State.HOME}
        assert moved(plan) == [(PULL, X, STORE, 2, D + S)]

    def test_home_row_is_pulled_without_state_by_several(self):
        oracle, (plan,) = play({0: "x", 2: "x"}, first_touch=False)
        assert moved(plan) == [(PULL, X, STORE, 0, D), (PULL, X, STORE, 2, D)]
        assert (oracle.entries[X].partial, oracle.entries[X].base) == ({0, 2}, set())

    def test_home_row_with_a_clean_copy_is_a_hit(self):
        _, plans = play({0: "x"}, {0: "x", 1: "x"}, sync="full")
        assert plans[1].states == {X: State.HOME}
        assert plans[1].hits == [1, 0, 0]
        assert [move for move in moved(plans[1]) if move[0] == PULL] == [(PULL, X, STORE, 1, D)]

    def test_owned_row_is_a_hit_for_its_owner(self):
        _, plans = play({0: "x"}, {0: "x"})
        assert plans[1].states == {X: State.OWNED}
        assert not plans[1].moves
        assert plans[1].hits == [1, 0, 0]

    def test_owned_row_goes_home_and_to_another(self):
        oracle, plans = play({0: "x"}, {1: "x"})
        assert moved(plans[1]) == [(PULL, X, STORE, 1, D + S), (UPDATE, X, 0, STORE, D + S)]
        assert plans[1].hits == [0, 0, 0]
        assert oracle.entries[X].latest == {1}

    def test_owned_row_shared_with_its_owner(self):
        oracle, plans = play({0: "x"}, {0: "x", 2: "x"})
        assert moved(plans[1]) == [(PULL, X, STORE, 2, D), (UPDATE, X, 0, STORE, D + S)]
        assert plans[1].hits == [1, 0, 0]
        assert (oracle.entries[X].partial, oracle.entries[X].base) == ({0, 2}, set())

    def test_split_row_is_summed_at_home(self):
        oracle, plans = play({0: "x", 1: "x"}, {1: "x"})
        assert plans[1].states == {X: State.SPLIT}
        assert moved(plans[1]) == [
            (PULL, X, STORE, 1, D + S),
            (UPDATE, X, 0, STORE, D),
            (UPDATE, X, 1, STORE, D),
        ]
        assert plans[1].hits == [0, 0, 0]
        assert oracle.entries[X].latest == {1}

    def test_split_row_is_pulled_without_state_by_several(self):
        _, plans = play({0: "x", 1: "x"}, {1: "x", 2: "x"})
        assert [move for move in moved(plans[1]) if move[0] == PULL] == [
            (PULL, X, STORE, 1, D),
            (PULL, X, STORE, 2, D),
        ]

    def test_replicated_row_is_all_reduced(self):
        _, plans = play({0: "xy", 1: "x"}, {2: "x"}, hot=frozenset({X}), admit_after=5)
        assert plans[0].states == {X: State.REPLICATED, Y: State.NOT_ADMITTED}
        assert not plans[0].moves
        assert (plans[0].lookups, plans[0].hits) == ([2, 1, 0], [1, 1, 0])
        assert [(plan.all_reduce_rows, plan.all_reduce_bytes) for plan in plans] == [(1, D), (1, D)]

    def test_row_is_admitted_when_it_was_seen_often_enough(self):
        oracle, plans = play({0: "x", 1: "x"}, {1: "xx"}, {2: "x"}, admit_after=3)
        assert [plan.states[X] for plan in plans] == [State.NOT_ADMITTED, State.FRESH, State.OWNED]
        assert plans[0].trainers == {X: {0, 1}}
        assert (plans[0].lookups, plans[0].hits) == ([1, 1, 0], [0, 0, 0])
        assert not plans[0].moves
        assert not plans[1].moves
        assert oracle.entries[X].latest == {2}

    def test_row_admitted_without_first_touch_is_at_home(self):
        _, plans = play({0: "x"}, {0: "x"}, admit_after=2, first_touch=False)
        assert [plan.states[X] for plan in plans] == [State.NOT_ADMITTED, State.HOME]
        assert moved(plans[1]) == [(PULL, X, STORE, 0, D + S)]


class TestPeerToPeer:
    def test_owned_row_is_sent_whole_to_a_sole_trainer(self):
        oracle, plans = play({0: "x"}, {1: "x"}, peer_to_peer=True)
        assert moved(plans[1]) == [(PEER, X, 0, 1, D + S)]
        assert oracle.entries[X].latest == {1}

    def test_owner_who_trains_stays_base(self):
        oracle, plans = play({1: "x"}, {0: "x", 1: "x", 2: "x"}, peer_to_peer=True)
        assert moved(plans[1]) == [(PEER, X, 1, 0, D), (PEER, X, 1, 2, D)]
        assert plans[1].hits == [0, 1, 0]
        assert oracle.entries[X].base == {1}

    def test_owner_who_does_not_train_makes_the_lowest_base(self):
        oracle, plans = play({0: "x"}, {1: "x", 2: "x"}, peer_to_peer=True)
        assert moved(plans[1]) == [(PEER, X, 0, 1, D + S), (PEER, X, 0, 2, D)]
        assert oracle.entries[X].base == {1}

    def test_without_optimizer_state_every_trainer_is_base(self):
        oracle, plans = play({0: "x"}, {1: "x", 2: "x"}, peer_to_peer=True, state=(0,))
        assert moved(plans[1]) == [(PEER, X, 0, 1, D), (PEER, X, 0, 2, D)]
        assert oracle.entries[X].base == {1, 2}

    def test_split_row_whose_base_is_home_is_summed_there(self):
        oracle, plans = play({0: "x", 1: "x"}, {0: "x", 1: "x"}, peer_to_peer=True)
        assert moved(plans[1]) == [
            (PULL, X, STORE, 0, D),
            (PULL, X, STORE, 1, D),
            (UPDATE, X, 0, STORE, D),
            (UPDATE, X, 1, STORE, D),
        ]
        assert oracle.entries[X].base == set()

    def test_split_row_is_summed_by_its_base(self):
        oracle, plans = play({1: "x"}, {0: "x", 1: "x"}, {0: "x", 1: "x", 2: "x"}, peer_to_peer=True)
        assert moved(plans[2]) == [(PEER, X, 0, 1, D), (PEER, X, 1, 0, D), (PEER, X, 1, 2, D)]
        assert oracle.entries[X].base == {1}

    def test_base_that_does_not_train_hands_the_record_on(self):
        oracle, plans = play({1: "x"}, {0: "x", 1: "x"}, {0: "x", 2: "x"}, peer_to_peer=True)
        assert moved(plans[2]) == [(PEER, X, 0, 1, D), (PEER, X, 1, 0, D + S), (PEER, X, 1, 2, D)]
        assert oracle.entries[X].base == {0}

    def test_base_gives_the_whole_record_to_a_sole_trainer(self):
        oracle, plans = play({1: "x"}, {0: "x", 1: "x"}, {2: "x"}, peer_to_peer=True)
        assert moved(plans[2]) == [(PEER, X, 0, 1, D), (PEER, X, 1, 2, D + S)]
        assert oracle.entries[X].latest == {2}


class TestEvictions:
    def test_owned_row_is_pushed_home(self):
        oracle, plans = play({0: "x"}, {0: "y"}, {0: "x"}, capacity=(1, 1, 1))
        assert plans[1].evicted == [{X}, set(), set()]
        assert moved(plans[1]) == [(EVICT, X, 0, STORE, D + S)]
        assert plans[2].states == {X: State.HOME}
        assert moved(plans[2]) == [(PULL, X, STORE, 0, D + S), (EVICT, Y, 0, STORE, D + S)]
        assert oracle.entries[Y].latest == set()

    def test_clean_copy_is_dropped_free(self):
        _, plans = play({0: "x"}, {0: "y"}, {0: "x"}, sync="full", capacity=(1, 1, 1))
        assert plans[1].evicted[0] == {X}
        assert [move for move in moved(plans[1]) if move[1] == X] == []
        assert moved(plans[2])[0] == (PULL, X, STORE, 0, D + S)
        assert plans[2].hits == [0, 0, 0]

    def test_outdated_copy_keeps_its_room_and_is_dropped_free(self):
        _, plans = play({0: "x"}, {1: "x"}, {0: "y"}, capacity=(1, 1, 1))
        assert plans[1].evicted == [set(), set(), set()]
        assert plans[2].evicted == [{X}, set(), set()]
        assert not plans[2].moves

    def test_outdated_copy_is_pulled_into_its_own_room(self):
        _, plans = play({0: "x"}, {1: "x"}, {0: "x"}, capacity=(1, 1, 1))
        assert plans[2].evicted == [set(), set(), set()]
        assert moved(plans[2]) == [(PULL, X, STORE, 0, D + S), (UPDATE, X, 1, STORE, D + S)]

    def test_row_that_others_train_now_was_pushed_already(self):
        oracle, plans = play({0: "x"}, {0: "y", 1: "x"}, capacity=(1, 1, 1))
        assert plans[1].evicted[0] == {X}
        assert moved(plans[1]) == [(PULL, X, STORE, 1, D + S), (UPDATE, X, 0, STORE, D + S)]
        assert oracle.entries[X].latest == {1}

    def test_split_row_loses_its_members_one_by_one(self):
        oracle, plans = play({0: "x", 1: "x"}, {0: "y"}, capacity=(1, 1, 1))
        assert moved(plans[1]) == [(EVICT, X, 0, STORE, D)]
        assert oracle.entries[X].state == State.SPLIT
        assert (oracle.entries[X].partial, oracle.entries[X].settled) == ({1}, {0})

        oracle, plans = play({0: "x", 1: "x"}, {0: "y"}, {1: "z"}, {2: "x"}, capacity=(1, 1, 1))
        assert moved(plans[2]) == [(EVICT, X, 1, STORE, D)]
        assert plans[3].states == {X: State.HOME}
        assert moved(plans[3]) == [(PULL, X, STORE, 2, D + S)]

    def test_split_row_with_one_member_left_is_summed_at_home(self):
        _, plans = play({0: "x", 1: "x"}, {0: "y"}, {1: "x"}, capacity=(1, 1, 1))
        assert moved(plans[2]) == [(PULL, X, STORE, 1, D + S), (UPDATE, X, 1, STORE, D)]

    def test_two_workers_evict_the_same_split_row_at_once(self):
        oracle, plans = play({0: "x", 1: "x"}, {0: "y", 1: "z"}, capacity=(1, 1, 1))
        assert moved(plans[1]) == [(EVICT, X, 0, STORE, D), (EVICT, X, 1, STORE, D)]
        assert oracle.entries[X].state == State.HOME

    @pytest.mark.parametrize(
        ("state", "by_zero", "by_one"), [(S, D, D + D + S), (0, D + D, D)], ids=["state", "no state"]
    )
    def test_first_base_to_go_carries_the_record(self, state, by_zero, by_one):
        oracle, plans = play(
            {1: "x"},
            {0: "x", 1: "x"},
            {0: "y", 1: "z"},
            capacity=(1, 1, 1),
            peer_to_peer=True,
            state=(state,),
        )
        assert moved(plans[2]) == [(EVICT, X, 0, STORE, by_zero), (EVICT, X, 1, STORE, by_one)]
        assert oracle.entries[X].state == State.HOME

    def test_base_evicted_leaves_the_rest_to_the_home(self):
        oracle, plans = play(
            {1: "x"}, {0: "x", 1: "x"}, {1: "z"}, {2: "x"}, capacity=(1, 1, 1), peer_to_peer=True
        )
        assert moved(plans[2]) == [(EVICT, X, 1, STORE, D + D + S)]
        assert moved(plans[3]) == [(PULL, X, STORE, 2, D + S), (UPDATE, X, 0, STORE, D)]
        assert oracle.entries[X].latest == {2}

    def test_base_brings_the_record_home_when_another_has_gone(self):
        _, plans = play({1: "x"}, {0: "x", 1: "x"}, {0: "z"}, {2: "x"}, capacity=(1, 1, 1), peer_to_peer=True)
        assert moved(plans[2]) == [(EVICT, X, 0, STORE, D)]
        assert moved(plans[3]) == [(PULL, X, STORE, 2, D + S), (UPDATE, X, 1, STORE, D + D + S)]


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
        assert moved(plans[3]) == [(PULL, X, STORE, 1, D), (UPDATE, X, 1, STORE, D)]
        assert plans[3].hits == [0, 0, 0]
        assert oracle.copies[1][X].seen == 4
        assert moved(plans[4]) == [(PULL, X, STORE, 2, D)]
        assert (oracle.versions[X], oracle.copies[0][X].seen) == (4, 3)

    def test_bounded_eviction_hands_over_what_is_pending(self):
        oracle, plans = play({0: "x"}, {0: "y"}, {0: "x"}, sync="bounded:2", capacity=(1, 1, 1))
        assert moved(plans[1]) == [(EVICT, X, 0, STORE, D)]
        assert moved(plans[2]) == [(PULL, X, STORE, 0, D), (EVICT, Y, 0, STORE, D)]
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
            NaiveMove(UPDATE, *X, 1, STORE, D + S, ready=2),
        }

    def test_bounded_pull_waits_for_pushes_of_the_same_iteration(self):
        _, plans = play(
            {0: "x", 1: "x"}, {0: "x"}, {0: "y"}, {0: "y"}, {1: "x", 2: "x"}, look_ahead=3, sync="bounded:1"
        )
        assert plans[4].moves.keys() >= {
            NaiveMove(UPDATE, *X, 1, STORE, D, ready=4),
            NaiveMove(PULL, *X, STORE, 1, D, ready=4),
            NaiveMove(PULL, *X, STORE, 2, D, ready=4),
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
