"""The oracle itself, pinned by examples that were worked out by hand: one for each line of the table."""

from __future__ import annotations

import pytest
from naive_examples import EVICT, PEER, PULL, STORE, UPDATE, D, S, X, Y, moved, play

from rowhaul.schedule.row_states import State


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
