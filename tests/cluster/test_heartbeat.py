"""Heartbeats of threads that stand for ranks, over a real store, twenty times as fast as real ones."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from rowhaul._threads import Failure
from rowhaul.cluster.heartbeat import Heartbeat
from rowhaul.cluster.roll_call import beat_key
from rowhaul.errors import ClusterError, RankLostError
from rowhaul.transport.base import LinkError

INTERVAL = 0.05
ROLES = ("worker 0", "worker 1", "store 0")


class Ranks:
    """Three ranks with a heartbeat each, all started."""

    def __init__(self, store_rank=None, num_missed=20):
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(3):
            PrefixStore("run", self.server).set(beat_key(rank), '{"beat": 0}')
        self.failures = [Failure() for _ in ROLES]
        self.beats = [
            Heartbeat(
                PrefixStore("run", self._connection()),
                rank,
                ROLES,
                failure,
                store_name="the rendezvous store at here:1",
                store_rank=store_rank,
                interval=INTERVAL,
                num_missed=num_missed,
            )
            for rank, failure in enumerate(self.failures)
        ]
        for beat in self.beats:
            beat.start()

    def _connection(self):
        return TCPStore("127.0.0.1", self.server.port, wait_for_workers=False, timeout=timedelta(seconds=20))

    def silence(self, rank):
        """As if the process was gone: no last post."""
        self.beats[rank]._over.set()
        self.beats[rank]._wake.set()
        self.beats[rank]._thread.join(10)

    def error_of(self, rank, seconds=20.0):
        assert self.beats[rank]._found.wait(seconds)
        return self.failures[rank].error


@pytest.fixture
def ranks():
    made = []

    def make(**options):
        made.append(Ranks(**options))
        return made[-1]

    yield make
    for one in made:
        for beat in one.beats:
            beat.leave(linger=0.1)


def test_a_silent_rank_is_lost_to_all_others(ranks):
    three = ranks()
    three.silence(1)
    for rank in (0, 2):
        error = three.error_of(rank)
        assert isinstance(error, RankLostError)
        assert (error.rank, error.role) == (1, "worker 1")
        assert str(error).startswith("rank 1 (worker 1) has not been heard of for 1 s")


def test_a_rank_that_has_said_goodbye_is_not_taken_for_dead(ranks):
    three = ranks(num_missed=10)
    three.beats[1].leave()
    assert not three.beats[0]._found.wait(25 * INTERVAL)
    assert three.failures[0].error is None
    three.silence(2)
    assert three.error_of(0).rank == 2


def test_the_reason_of_a_failure_reaches_the_others(ranks):
    three = ranks()
    three.failures[2].set(KeyError("row 5"))
    for rank in (0, 1):
        assert str(three.error_of(rank)) == "rank 2 (store 0) failed: KeyError: 'row 5'"


def test_a_rank_that_ends_because_of_another_names_that_one_to_the_rest(ranks):
    three = ranks()
    three.beats[0].leave(RankLostError(1, "worker 1", "was seen falling"))
    assert str(three.error_of(2)) == "rank 1 (worker 1) was seen falling"


def test_a_broken_connection_is_explained_by_the_rank_that_is_gone(ranks):
    three = ranks()
    three.failures[0].set(LinkError("receiving failed", 1))
    three.silence(1)
    with pytest.raises(RankLostError, match=r"rank 1 \(worker 1\) has not been heard of") as caught:
        three.failures[0].check()
    assert isinstance(caught.value.__cause__, LinkError)
    assert three.error_of(2).rank == 1  # not rank 0, whose connection broke


def test_a_broken_connection_to_a_rank_that_has_finished_is_explained(ranks):
    three = ranks(num_missed=10)
    three.beats[1].leave()
    explained = three.beats[0].explain(LinkError("receiving failed", 1))
    assert isinstance(explained, ClusterError)
    assert "rank 1 (worker 1) finished before this rank did" in str(explained)


def test_an_error_of_ones_own_is_not_explained_away(ranks):
    three = ranks()
    error = KeyError("mine")
    assert three.beats[0].explain(error) is error


def test_a_broken_connection_that_nobody_explains_is_raised_as_it_is(ranks):
    three = ranks(num_missed=10)
    error = LinkError("receiving failed", 1)
    assert three.beats[0].explain(error) is error


def test_the_loss_of_the_store_is_told(ranks):
    three = ranks(num_missed=10)
    stuck = threading.Event()
    three.beats[0]._round = lambda post: stuck.wait(20)  # a request that gets no answer
    assert "the rendezvous store at here:1 has not answered" in str(three.error_of(0))
    stuck.set()


def test_the_rank_that_keeps_the_store_stays_until_the_others_have_left(ranks):
    three = ranks(store_rank=0)
    leaving = threading.Thread(target=three.beats[0].leave)
    leaving.start()
    leaving.join(10 * INTERVAL)
    assert leaving.is_alive()
    three.beats[1].leave()
    three.beats[2].leave()
    leaving.join(20)
    assert not leaving.is_alive()
    assert all(failure.error is None for failure in three.failures)
