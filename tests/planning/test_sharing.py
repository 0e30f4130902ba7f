"""Plans reach the other processes of a host as they are, without copies, leaks or silent ends."""

import contextlib
import dataclasses
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from planned_cases import all_plans, assert_same, planner, samples, settings
from sharing_ends import LEADER, accepting, as_shared, close_all, connected

from rowhaul._threads import Failure
from rowhaul.errors import CacheTooSmallError, ConfigError, SecretError
from rowhaul.planning import sharing
from rowhaul.planning.planner import samples_digest
from rowhaul.planning.sharing import LeaderLostError, PlanClient, PlanServer, SubscriberLostError
from rowhaul.schedule import CacheSettings

FOLLOWER = Path(__file__).with_name("plan_follower.py")


@pytest.fixture(scope="module")
def planned():
    return all_plans(planner([samples(0), samples(1)], ahead=10))[1]


def num_descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


class Followers:
    """Processes that follow a leader; ended with the test."""

    def __init__(self):
        self.processes = []

    def start(self, address, rank, *most):
        command = [sys.executable, str(FOLLOWER), address, str(rank), str(LEADER), *map(str, most)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def lines(self, process):
        """Everything that a follower said."""
        told, _ = process.communicate(timeout=200)
        return [json.loads(line) for line in told.splitlines()]


@pytest.fixture
def followers():
    started = Followers()
    yield started
    for process in started.processes:
        process.kill()
        process.communicate(timeout=200)


# Between processes


def test_two_processes_get_every_plan_of_the_leader(followers):
    failure = Failure()
    server = PlanServer(LEADER, [0, 3], failure)
    processes = [followers.start(server.address, rank) for rank in (0, 3)]
    server.accept()
    made = planner([samples(number) for number in range(30)], failure, ahead=100, audience=server)
    own = all_plans(made)
    server.close()
    for process in processes:
        *lines, last = followers.lines(process)
        assert last == {"ended": 30}
        for line, planned in zip(lines, own, strict=True):
            assert line["iteration"] == planned.plan.iteration
            assert line["told"] == [planned.plan_digest.hex(), planned.samples_digest.hex()]
            assert line["plan"] == as_shared(planned).plan.digest().hex()
            assert line["samples"] == planned.samples_digest.hex()
        assert lines[-1]["descriptors"] <= lines[2]["descriptors"]


def test_the_leaders_error_is_raised_by_its_followers(followers):
    failure = Failure()
    server = PlanServer(LEADER, [0], failure)
    process = followers.start(server.address, 0)
    server.accept()
    tiny = settings(cache=CacheSettings(capacity=1))
    made = planner([samples(0)], failure, tiny, ahead=1, audience=server)
    with pytest.raises(CacheTooSmallError) as raised:
        made.next()
    made.close()
    server.close()
    (line,) = followers.lines(process)
    assert (line["error"], line["text"]) == ("CacheTooSmallError", str(raised.value))
    assert line["notes"] == [f"(on rank {LEADER}, which plans for this host)"]


@pytest.mark.slow
def test_a_killed_leader_ends_its_follower_with_a_clear_error(followers):
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from planned_cases import planner, samples\n"
        "from rowhaul._threads import Failure\n"
        "from rowhaul.planning.sharing import PlanServer\n"
        f"server = PlanServer({LEADER}, [2], Failure(), '@' + sys.argv[2])\n"
        "server.accept()\n"
        "planner((samples(number) for number in range(9)), ahead=1, audience=server).next()\n"
        "time.sleep(600)"
    )
    name = f"rowhaul-test-{os.getpid()}"
    leader = subprocess.Popen([sys.executable, "-c", program, str(FOLLOWER.parent), name])
    followers.processes.append(leader)
    process = followers.start("@" + name, 2)
    assert json.loads(process.stdout.readline())["iteration"] == 0
    leader.send_signal(signal.SIGKILL)
    (line,) = followers.lines(process)
    assert line["error"] == "LeaderLostError"
    assert line["text"].startswith(f"rank {LEADER}, which plans for this host, has ended")


@pytest.mark.slow
def test_a_follower_that_has_gone_is_named(followers, planned):
    server = PlanServer(LEADER, [0, 5], Failure())
    gone, stays = followers.start(server.address, 5, 1), followers.start(server.address, 0)
    server.accept()
    server.send(planned)
    assert followers.lines(gone)[-1] == {"ended": 1}
    with pytest.raises(SubscriberLostError, match="rank 5 does not accept plans from rank 7") as raised:
        server.send(planned)
    server.fail(raised.value)
    server.close()
    assert followers.lines(stays)[-1]["error"] == "SubscriberLostError"


# In one process

OF_A_FILE = 1 if sys.version_info >= (3, 13) else 2  # descriptors: before, its mapping has another


@pytest.mark.slow
def test_no_descriptor_is_left_behind_over_thousands_of_plans(planned):
    before = num_descriptors()
    server, one, other = connected((0, 1))
    opened = num_descriptors()
    for _ in range(2000):
        server.send(planned)
        assert one.next().plan_digest == other.next().plan_digest == planned.plan_digest
    assert num_descriptors() == opened + OF_A_FILE, "one file is used again and again"
    server.end()
    assert one.next() is None
    close_all(server, one, other)
    assert num_descriptors() == before


def test_a_plan_that_is_kept_does_not_change_when_later_ones_are_sent(planned):
    """Files are used again, but none that anybody still looks at; of many, not all are kept."""
    server, one, other = connected((0, 1))
    expected, kept, opened = planned.plan_digest, [], num_descriptors()
    for number in range(30):
        server.send(dataclasses.replace(planned, decision_seconds=float(number)))
        mine, theirs = one.next(), other.next()
        if number % 2:
            kept.append((number, mine, theirs if number % 3 else None))
    for number, *plans in kept:
        for one_kept in (plan for plan in plans if plan is not None):
            assert one_kept.decision_seconds == number
            assert dataclasses.replace(one_kept.plan, ids=None).digest() == expected
            assert samples_digest(one_kept.samples) == planned.samples_digest
    del mine, theirs, one_kept, plans
    kept.clear()
    gc.collect()
    assert num_descriptors() <= opened + 8 * OF_A_FILE
    close_all(server, one, other)


def test_descriptors_of_plans_never_taken_are_freed(planned):
    before = num_descriptors()
    server, client = connected()
    for _ in range(20):
        server.send(planned)
    close_all(client, server)
    assert num_descriptors() == before


def test_the_end_and_an_error_are_told_again_and_again(planned):
    server, client = connected()
    server.send(planned)
    server.end()
    server.fail(ConfigError("comes after the end, and is not told"))
    assert_same(client.next(), as_shared(planned))
    assert client.next() is None
    assert client.next() is None
    close_all(server, client)
    server, client = connected()
    server.fail(ConnectionResetError("a rank was lost"))
    for _ in range(2):
        with pytest.raises(ConnectionResetError, match="a rank was lost"):
            client.next()
    close_all(server, client)


def test_waiting_for_a_plan_ends_when_the_rank_fails():
    failure = Failure()
    server, client = connected(follower_failure=failure)
    threading.Timer(0.05, failure.set, [KeyError("lost")]).start()
    with pytest.raises(KeyError, match="lost"):
        client.next()
    close_all(server, client)


def test_sending_to_a_follower_that_takes_nothing_ends_when_the_rank_fails(planned):
    failure = Failure()
    server, client = connected(leader_failure=failure)
    threading.Timer(0.5, failure.set, [KeyError("lost")]).start()
    with pytest.raises(KeyError, match="lost"):
        send_for_ever(server, planned)
    close_all(server, client)


def send_for_ever(server, planned):
    while True:
        server.send(planned)


def test_subscribers_that_do_not_come_are_named():
    server = PlanServer(LEADER, [0, 1, 2], Failure())
    with (
        pytest.raises(SubscriberLostError, match="ranks 0, 2 did not connect to rank 7"),
        accepting(server, timeout=3),
    ):
        client = PlanClient(server.address, 1, LEADER, Failure())
    close_all(server, client)


def test_a_leader_that_does_not_come_is_named(tmp_path):
    for address in (str(tmp_path / "none"), "@rowhaul-test-nobody-listens"):
        with pytest.raises(
            LeaderLostError, match="rank 7, which plans for this host, did not open its socket"
        ):
            PlanClient(address, 0, LEADER, Failure(), timeout=0.3)


def test_a_follower_that_was_too_slow_tries_again(planned, monkeypatch):
    """As when the system does not let it run for longer than a stranger may be silent."""
    attempts, lets_in = [], sharing.lets_in

    def refuse_the_first(*arguments):
        attempts.append(arguments)
        return len(attempts) > 1 and lets_in(*arguments)

    monkeypatch.setattr(sharing, "lets_in", refuse_the_first)
    server, client = connected()
    assert len(attempts) == 2
    server.send(planned)
    assert_same(client.next(), as_shared(planned))
    close_all(server, client)


def test_strangers_are_not_served(planned):
    server = PlanServer(LEADER, [0], Failure())
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect("\0" + server.address[1:])
    stranger.sendall(b"\7" * 8)
    with accepting(server):
        client = PlanClient(server.address, 0, LEADER, Failure())
    server.send(planned)
    assert_same(client.next(), as_shared(planned))
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    close_all(server, client, stranger)


def test_a_secret_is_proved_by_both_ends(planned):
    server, client = connected(secret=b"a secret of this run")
    server.send(planned)
    assert_same(client.next(), as_shared(planned))
    close_all(server, client)


@pytest.mark.parametrize("secret", [None, b"a secret of another run"])
def test_another_secret_is_refused_and_the_right_one_still_let_in(planned, caplog, secret):
    ours = b"a secret of this run"
    server = PlanServer(LEADER, [0], Failure(), secret=ours)
    with accepting(server):
        with pytest.raises(SecretError):
            PlanClient(server.address, 0, LEADER, Failure(), secret=secret)
        client = PlanClient(server.address, 0, LEADER, Failure(), secret=ours)
    assert "the socket of a planner refused a process" in caplog.text
    assert ours.decode() not in caplog.text
    close_all(server, client)


def test_a_path_serves_as_an_address_and_is_removed_once_all_are_there(tmp_path, planned):
    path = tmp_path / "plans"
    server, client = connected(address=str(path))
    assert not path.exists()
    server.send(planned)
    assert_same(client.next(), as_shared(planned))
    close_all(server, client)


def test_an_address_in_use_is_told(tmp_path):
    server = PlanServer(LEADER, [], Failure())
    with pytest.raises(OSError, match=f"cannot share plans at the socket {server.address}: .*in use"):
        PlanServer(LEADER, [], Failure(), server.address)
    server.close()
