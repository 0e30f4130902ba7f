"""Heartbeats of three ranks in one process, each with a real watchdog, ten times as fast as real ones."""

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time

import pytest
from torch.distributed import HashStore

from rowhaul._activity import Activity, Page
from rowhaul._ports import free_port
from rowhaul._proof import demand, prove
from rowhaul._threads import Failure
from rowhaul.cluster import heartbeat
from rowhaul.cluster.heartbeat import Heartbeat, stacks
from rowhaul.cluster.watchdog.settings import PURPOSE, Settings
from rowhaul.errors import ClusterError, RankLostError
from rowhaul.planning.sharing import LeaderLostError
from rowhaul.transport.base import LinkError

INTERVAL = 0.1
ROLES = ("worker 0", "worker 1", "store 0")


def settings(rank, **options):
    given = {
        "process": os.getpid(),
        "token": "run",
        "roles": ROLES,
        "addresses": ("10.0.0.1", "10.0.0.2", "10.0.0.7"),
        "listen": "127.0.0.1",
        "interval": INTERVAL,
        "num_missed": 20,
        "first_missed": 200,
    }
    return Settings(rank, **{**given, **options})


class Ranks:
    """Three ranks with a heartbeat each, all started; some silent strangers connect before them."""

    def __init__(self, secrets=(None, None, None), num_strangers=0, **options):
        self.failures = [Failure() for _ in ROLES]
        self.pages = [Page() for _ in ROLES]
        self.beats = [
            Heartbeat(
                settings(rank, secret=secrets[rank], **options),
                failure,
                keeps_store=rank == 0,
                page=self.pages[rank],
            )
            for rank, failure in enumerate(self.failures)
        ]
        for beat in self.beats:
            beat.start()
        self.port = self.beats[0].port()
        self.strangers = [self.stranger() for _ in range(num_strangers)]
        for beat in self.beats:
            beat.connect("127.0.0.1", self.port)

    def stranger(self):
        return socket.create_connection(("127.0.0.1", self.port), 60)

    def wait_for_beats(self):
        wait_until(lambda: len(self.beats[0].table()) == 3)
        return self

    def signal(self, rank, number):
        """Send a signal to a rank's watchdog."""
        os.kill(self.beats[rank]._process.pid, number)

    def error_of(self, rank, seconds=60.0):
        assert self.beats[rank]._found.wait(seconds)
        return self.failures[rank].error


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
            beat._process.kill()
            beat._thread.join(20)
            assert not beat._thread.is_alive()
        for stranger in one.strangers:
            stranger.close()


def test_a_silent_rank_is_lost_to_all_others(ranks):
    three = ranks().wait_for_beats()
    three.signal(1, signal.SIGSTOP)
    for rank in (0, 2):
        error = three.error_of(rank)
        assert isinstance(error, RankLostError)
        assert (error.rank, error.role) == (1, "worker 1")
        assert str(error).startswith("rank 1 (worker 1) has not been heard of for 2 s")


def test_a_rank_whose_connection_breaks_is_lost_at_once(ranks):
    three = ranks(num_missed=100_000).wait_for_beats()
    three.signal(1, signal.SIGKILL)
    assert str(three.error_of(2)).startswith("rank 1 (worker 1) has closed its connection without a word")
    assert "the watchdog that beats for this rank has ended" in str(three.error_of(1))


@pytest.mark.parametrize(
    ("number", "what"),
    [(signal.SIGKILL, "has closed the connection"), (signal.SIGSTOP, "has not answered for 2 s")],
)
def test_the_loss_of_the_hub_is_the_loss_of_rank_0(ranks, number, what):
    three = ranks().wait_for_beats()
    three.signal(0, number)
    for rank in (1, 2):
        error = three.error_of(rank)
        assert error.rank == 0
        assert str(error).startswith("rank 0 (worker 0) is lost: its watchdog at 127.0.0.1:")
        assert str(error).endswith(what)


def test_a_rank_that_has_said_goodbye_is_not_taken_for_dead(ranks):
    three = ranks(num_missed=30).wait_for_beats()
    three.beats[1].leave()
    assert not three.beats[0]._found.wait(45 * INTERVAL)
    assert three.failures[0].error is None
    three.signal(2, signal.SIGSTOP)
    assert three.error_of(0).rank == 2


def test_the_others_go_on_when_rank_0_has_left(ranks):
    three = ranks(num_missed=30).wait_for_beats()
    three.beats[0].leave(linger=0)
    assert not three.beats[1]._found.wait(45 * INTERVAL)
    three.beats[2].leave(KeyError("row 5"))
    assert str(three.error_of(1)) == "rank 2 (store 0) failed: KeyError: 'row 5'"


def test_the_reason_of_a_failure_reaches_the_others(ranks):
    three = ranks().wait_for_beats()
    three.failures[2].set(KeyError("row 5"))
    for rank in (0, 1):
        assert str(three.error_of(rank)) == "rank 2 (store 0) failed: KeyError: 'row 5'"


def test_a_rank_that_ends_because_of_another_names_that_one_to_the_rest(ranks):
    three = ranks().wait_for_beats()
    three.beats[0].leave(RankLostError(1, "worker 1", "was seen falling"))
    assert str(three.error_of(2)) == "rank 1 (worker 1) was seen falling"


@pytest.mark.parametrize("error", [LinkError("receiving failed", 1), LeaderLostError("rank 1 has ended")])
def test_a_broken_connection_is_explained_by_the_rank_that_is_gone(ranks, error):
    three = ranks().wait_for_beats()
    three.failures[0].set(error)
    three.signal(1, signal.SIGSTOP)
    with pytest.raises(RankLostError, match=r"rank 1 \(worker 1\) has not been heard of") as caught:
        three.failures[0].check()
    assert caught.value.__cause__ is error
    assert three.error_of(2).rank == 1  # not rank 0, whose connection broke


def test_a_broken_connection_to_a_rank_that_has_finished_is_explained(ranks):
    three = ranks(num_missed=30).wait_for_beats()
    three.beats[1].leave()
    explained = three.beats[0].explain(LinkError("receiving failed", 1))
    assert isinstance(explained, ClusterError)
    assert "rank 1 (worker 1) finished before this rank did" in str(explained)


def test_an_error_of_ones_own_is_not_explained_away(ranks):
    three = ranks()
    error = KeyError("mine")
    assert three.beats[0].explain(error) is error


def test_a_broken_connection_that_nobody_explains_is_raised_as_it_is(ranks):
    three = ranks(num_missed=30)
    error = LinkError("receiving failed", 1)
    assert three.beats[0].explain(error) is error


def test_the_rank_that_keeps_the_store_stays_until_the_others_have_left(ranks):
    three = ranks().wait_for_beats()
    leaving = threading.Thread(target=three.beats[0].leave)
    leaving.start()
    leaving.join(10 * INTERVAL)
    assert leaving.is_alive()
    three.beats[1].leave()
    three.beats[2].leave()
    leaving.join(20)
    assert not leaving.is_alive()
    assert all(failure.error is None for failure in three.failures)
    for beat in three.beats:  # the watchdogs end by themselves
        beat._thread.join(20)
        assert beat._process.poll() == 0


def test_a_rank_that_never_begins_to_beat_is_named(ranks):
    three = ranks(first_missed=100, secrets=(b"s" * 16, b"s" * 16, b"other secret ...."))
    assert "has another secret" in str(three.error_of(2))
    assert str(three.error_of(1)).startswith("rank 2 (store 0) has not begun to beat within 10 s")


def test_silent_strangers_make_way_for_ranks(ranks):
    three = ranks(num_strangers=70, proof_seconds=600.0).wait_for_beats()  # the hub bears 64
    assert three.strangers[0].recv(1) == b""  # the oldest
    assert all(failure.error is None for failure in three.failures)


@pytest.fixture
def rank_1():
    """The heartbeat of a rank whose hub is the test."""
    failure = Failure()
    beat = Heartbeat(settings(1, first_missed=100_000), failure, page=Page())
    beat.start()
    yield beat, failure
    beat.leave()
    beat._process.kill()
    beat._thread.join(20)


def test_a_rank_that_had_to_make_way_tries_again(rank_1):
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(60)
        rank_1[0].connect(*hub.getsockname())
        hub.accept()[0].close()
        with hub.accept()[0] as connection:
            demand(connection, None, 60, PURPOSE)
            assert b'"rank": 1' in connection.recv(100)
            assert rank_1[1].error is None


def test_a_rank_waits_for_the_watchdog_of_rank_0_as_long_as_rank_0_does(rank_1):
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(60)
        threading.Timer(1.0, lambda: store.set("watchdog", json.dumps(hub.getsockname()))).start()
        rank_1[0].meet(store, 0.1)  # seconds that ranks may begin apart
        with hub.accept()[0] as connection:
            demand(connection, None, 60, PURPOSE)


def test_a_hub_that_is_gone_is_lost_at_once(rank_1):
    beat, failure = rank_1
    beat.connect("127.0.0.1", free_port())
    assert beat._found.wait(60)
    assert "rank 0 (worker 0) is lost: its watchdog at 127.0.0.1:" in str(failure.error)
    assert "cannot be reached" in str(failure.error)


@pytest.mark.parametrize("line", [b"[" * 100_000, b"[1]", b"null", b"{", b"\xff"], ids=lambda line: line[:6])
def test_nonsense_ends_its_connection_alone(ranks, line):
    three = ranks().wait_for_beats()
    with three.stranger() as stranger:
        prove(stranger, None, 60, PURPOSE)
        stranger.sendall(line + b"\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    three.pages[2].progressed(iteration=7)
    wait_until(lambda: three.beats[0]._found.is_set() or three.beats[0].table()[2].iteration == 7)
    assert all(failure.error is None for failure in three.failures)


def test_a_rank_that_holds_up_the_others_is_named_with_its_stacks_and_the_run_goes_on(ranks, caplog):
    with caplog.at_level(logging.WARNING):
        three = ranks(warn_seconds=1.0, stacks=True)
        three.pages[0].set(0, Activity.AWAITING_ROWS, time.monotonic())
        three.pages[1].set(0, Activity.SUMMING, time.monotonic())
        three.pages[2].set(0, Activity.AWAITING_PLAN, time.monotonic())
        three.pages[2].set(1, Activity.READING, time.monotonic() - 40)
        wait_until(lambda: "waiting for rank 2 (10.0.0.7), reading data since 4" in caplog.text)
        wait_until(lambda: "stacks of rank 2:" in caplog.text and "test_heartbeat.py" in caplog.text)
        three.pages[2].progressed(iteration=7)
        wait_until(lambda: "going on after" in caplog.text)
    wait_until(lambda: three.beats[0].table()[2].iteration == 7)  # another rank may have noticed first
    assert all(failure.error is None for failure in three.failures)


def deep(frames, until):
    """Wait with this many frames on the stack."""
    if frames:
        deep(frames - 1, until)
    else:
        until.wait(60)


def test_stacks_of_many_deep_threads_are_cut_and_lose_nobody(ranks, caplog):
    """They are sent to all ranks: too much to send would end the connection."""
    done = threading.Event()
    waiting = [threading.Thread(target=deep, args=(400, done), daemon=True) for _ in range(64)]
    for thread in waiting:
        thread.start()
    try:
        with caplog.at_level(logging.WARNING):
            three = ranks(warn_seconds=1.0, stacks=True)
            for rank, activity in enumerate((Activity.AWAITING_ROWS, Activity.SUMMING, Activity.READING)):
                three.pages[rank].set(0, activity, time.monotonic())
            wait_until(lambda: "stacks of rank 2:\nthread MainThread" in caplog.text)
            time.sleep(1.0)  # an error would follow at once
        assert all(failure.error is None for failure in three.failures)
        assert len(stacks()) < 2 * heartbeat._MOST_STACKS
    finally:
        done.set()
        for thread in waiting:
            thread.join(20)


def test_a_run_that_is_stuck_for_too_long_ends_and_names_the_rank(ranks):
    three = ranks(warn_seconds=0.5, end_seconds=2.0)
    three.pages[0].set(0, Activity.AWAITING_ROWS, time.monotonic())
    three.pages[1].set(0, Activity.SAVING, time.monotonic())
    three.pages[2].set(0, Activity.WAITING, time.monotonic())
    for rank in range(3):
        error = three.error_of(rank)
        assert (error.rank, error.role) == (1, "worker 1")
        assert "has held up the others for 2 s, saving a checkpoint since" in str(error)
        assert "cluster.stuck_after" in str(error)


def test_ranks_that_all_wait_for_each_other_are_named(ranks):
    three = ranks(warn_seconds=0.5, end_seconds=2.0)
    for page in three.pages:
        page.set(0, Activity.AWAITING_ROWS, time.monotonic())
    message = str(three.error_of(1))
    assert message.startswith("no rank has made progress for 2 s, all wait for each other: rank 0 (10.0.0.1)")


def test_ranks_that_wait_for_nobody_are_left_alone(ranks):
    three = ranks(warn_seconds=0.2, end_seconds=0.4).wait_for_beats()
    three.pages[1].set(0, Activity.COMPUTING, time.monotonic())
    assert not three.beats[0]._found.wait(20 * INTERVAL)
