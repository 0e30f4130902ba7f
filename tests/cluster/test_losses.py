"""A rank that is killed, stopped or fails is named by the others, whatever they are doing."""

import os
import signal
import socket

import psutil
import pytest
from rank_processes import started

from rowhaul.cluster.place import STORE_VARIABLE
from rowhaul.cluster.secret import VARIABLE
from rowhaul.cluster.store_server import StoreServer

pytestmark = pytest.mark.slow

# Everyone waits for a message from the victim, in a thread, as the runtime does.
WAITING = """
from rowhaul._threads import SerialExecutor
victim = int(os.environ["VICTIM"])
try:
    with join(num_stores=1, timeouts=Timeouts(arrival=90, silence=3)) as cluster:
        executor = SerialExecutor("moves", cluster.failure)
        while rank == 0 and len(cluster.heartbeat.table()) < 3:  # until the hub has heard of all
            time.sleep(0.05)
        say(joined=True)
        if rank == victim:
            sys.stdin.readline()
            raise KeyError("a user's mistake")
        def receive():
            got = np.zeros(10, np.uint8)
            cluster.moves.post({victim: got}, {}).wait_received()
        executor.submit(receive).wait()
except Exception as error:
    say(error=str(error), kind=type(error).__name__, rank=getattr(error, "rank", None))
say(ended=True)
"""


def lose(victim, how, script=WAITING):
    """What the two other ranks say."""
    with started(script, 3, VICTIM=str(victim)) as ranks:
        for rank in ranks:
            rank.wait_for("joined")
        how(ranks[victim].process)
        return [rank.wait(200) for rank in ranks if rank.rank != victim]


def by(number):
    return lambda process: os.kill(process.pid, number)


STOPPED = "is stopped (SIGSTOP, or Ctrl-Z) and has not run for 3 s"
KILLED = "has ended without a word: its process was killed or has crashed"


@pytest.mark.parametrize(
    ("victim", "role", "number", "how"),
    [
        (0, "worker 0", signal.SIGSTOP, STOPPED),
        (0, "worker 0", signal.SIGKILL, KILLED),
        (1, "worker 1", signal.SIGSTOP, STOPPED),
        (2, "store 0", signal.SIGKILL, KILLED),
    ],
)
def test_a_rank_that_is_killed_or_stopped_is_named_by_the_others(victim, role, number, how):
    for report in lose(victim, by(number)):
        assert report["error"].startswith(f"rank {victim} ({role}) {how}")
        assert report["kind"] == "RankLostError"
        assert report["rank"] == victim
        assert report["ended"]
        assert report["code"] == 0


def test_what_a_failing_rank_raised_is_told_to_the_others():
    def speak(process):
        process.stdin.write("\n")
        process.stdin.flush()

    for report in lose(1, speak):
        assert report["error"] == 'rank 1 (worker 1) failed: KeyError: "a user\'s mistake"'


# Rank 0, which has the store, and rank 1 hold the GIL for longer than the limit, as a long copy in C does.
HOLDING = """
import ctypes
with join(num_stores=1, timeouts=Timeouts(arrival=90, silence=3)) as cluster:
    say(joined=True)
    require_all(cluster, "beginning")
    if rank < 2:
        ctypes.PyDLL(None).sleep(16 - 6 * rank)
    require_all(cluster, "going on")
say(ended=True)
"""


def test_ranks_that_hold_the_gil_for_long_are_not_taken_for_dead():
    with started(HOLDING, 3) as ranks:
        for rank in ranks:
            assert rank.wait(90) | {"joined": True, "ended": True, "code": 0} == rank.wait()


def test_a_rank_whose_watchdog_dies_too_is_named():
    def both(process):
        watchdogs = psutil.Process(process.pid).children()
        assert len(watchdogs) == 1
        for one in (watchdogs[0].pid, process.pid):
            os.kill(one, signal.SIGKILL)

    for report in lose(1, both):
        assert report["error"].startswith("rank 1 (worker 1) has closed its connection without a word")


def test_the_loss_of_a_launchers_store_is_named():
    """As when our launcher is killed: the ranks live, but could not save."""
    secret = "a secret of three ranks 21c4"
    store = StoreServer([socket.create_server(("127.0.0.1", 0))], secret.encode())
    variables = {STORE_VARIABLE: f"127.0.0.1:{store.port}", VARIABLE: secret, "VICTIM": "1"}
    with started(WAITING, 3, **variables) as ranks:
        for rank in ranks:
            rank.wait_for("joined")
        store.close()
        for rank in (ranks[0], ranks[2]):
            report = rank.wait(200)
            assert report["error"].startswith("the rendezvous store at 127.0.0.1:"), report
            assert "its launcher, or the host of that, has died" in report["error"]
