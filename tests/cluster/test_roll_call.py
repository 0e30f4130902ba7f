"""The roll call between threads over a real store: late, stale, doubled and disagreeing ranks."""

import json
import threading
import uuid
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from rowhaul.cluster.roll_call import PREFIX, Member, call_the_roll
from rowhaul.errors import ClusterError
from rowhaul.schedule.topology import Topology

TOPOLOGY = Topology(2, 1)


@pytest.fixture
def server():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def member(rank, topology=TOPOLOGY):
    return Member(rank, uuid.uuid4().hex, "host", "name", "127.0.0.1", 1000 + rank, topology)


def attend(server, *members, seconds=20.0):
    """The roster, or the error, that each of some threads comes back with."""
    outcomes = [None] * len(members)

    def come(place):
        store = TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=20))
        try:
            outcomes[place] = call_the_roll(store, members[place], seconds)
        except ClusterError as error:
            outcomes[place] = str(error)

    threads = [threading.Thread(target=come, args=(place,)) for place in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_all_get_the_same_roster_in_the_order_of_ranks(server):
    outcomes = attend(server, member(2), member(0), member(1))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert [one.rank for one in outcomes[0].members] == [0, 1, 2]


def test_ranks_that_are_started_again_do_not_take_an_old_roster_for_theirs(server):
    first = attend(server, member(0), member(1), member(2))
    members = [member(0), member(1), member(2)]
    second = attend(server, *members)
    assert second[0].token != first[0].token
    assert list(second[1].members) == members


def test_missing_ranks_are_named_by_those_that_came(server):
    outcomes = attend(server, member(0), member(1), seconds=3.0)
    assert all("rank 2 (store 0) of 3 did not arrive within 3 s" in outcome for outcome in outcomes)


def test_rank_0_is_named_when_only_its_old_call_is_there(server):
    attend(server, member(0), member(1), seconds=2.0)
    outcomes = attend(server, member(1), member(2), seconds=2.0)
    assert all("rank 0 (worker 0) of 3 did not arrive" in outcome for outcome in outcomes)


def test_a_rank_that_has_given_up_is_not_counted_on(server):
    store = PrefixStore(PREFIX, server)
    outcome = []
    caller = threading.Thread(
        target=lambda: outcome.extend(attend(server, member(0), seconds=5.0)), name="rank 0"
    )
    caller.start()
    attend(server, member(1), seconds=2.0)
    token = json.loads(store.get("call"))["token"]
    assert not store.check([f"{token}/arrived/1"])
    caller.join()
    assert "rank 1 (worker 1), rank 2 (store 0) of 3" in outcome[0]


def test_two_processes_of_one_rank_are_told(server):
    twins = [member(1), member(1)]
    late = threading.Timer(2.0, lambda: attend(server, member(2)))
    late.start()
    outcomes = attend(server, member(0), *twins)
    late.join()
    told = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(told) == 1
    assert "two processes say that they are rank 1" in told[0]


def test_ranks_that_divide_the_roles_differently_are_told(server):
    outcomes = attend(server, member(0), member(1, Topology(1, 2)), member(2))
    expected = "2 workers, 1 stores, peer_to_peer=False on ranks 0, 2; 1 workers, 2 stores"
    assert all(expected in outcome for outcome in outcomes)


def test_ranks_that_wait_for_different_numbers_are_told(server):
    outcomes = attend(server, member(0), member(1, Topology(3, 1)), seconds=5.0)
    assert "rank 0 waits for 3 ranks and rank 1 for 4" in outcomes[1]
