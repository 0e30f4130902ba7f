"""A rank that is killed, stopped or fails is named by the others, whatever they are doing."""

import os
import signal

import pytest
from rank_processes import started

pytestmark = pytest.mark.slow

# Everyone waits for a message from the victim, in a thread, as the runtime does.
WAITING = """
from rowhaul._threads import SerialExecutor
victim = int(os.environ["VICTIM"])
try:
    with join(num_stores=1, timeouts=Timeouts(arrival=90, silence=3)) as cluster:
        executor = SerialExecutor("moves", cluster.failure)
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


def lose(victim, how):
    """What the two other ranks say."""
    with started(WAITING, 3, VICTIM=str(victim)) as ranks:
        for rank in ranks:
            rank.wait_for("joined")
        how(ranks[victim].process)
        return [rank.wait(60) for rank in ranks if rank.rank != victim]


def by(number):
    return lambda process: os.kill(process.pid, number)


@pytest.mark.parametrize(
    ("victim", "role", "number"), [(1, "worker 1", signal.SIGSTOP), (2, "store 0", signal.SIGKILL)]
)
def test_a_rank_that_is_killed_or_stopped_is_named_by_the_others(victim, role, number):
    for report in lose(victim, by(number)):
        assert report["error"].startswith(f"rank {victim} ({role}) has not been heard of for 3 s")
        assert report["kind"] == "RankLostError"
        assert report["rank"] == victim
        assert report["ended"]
        assert report["code"] == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_that_keeps_the_store_is_named_although_the_store_is_lost_too(number):
    for report in lose(0, by(number)):
        assert report["error"].startswith("rank 0 (worker 0) is lost: the rendezvous store at 127.0.0.1:")
        assert report["code"] == 0


def test_what_a_failing_rank_raised_is_told_to_the_others():
    def speak(process):
        process.stdin.write("\n")
        process.stdin.flush()

    for report in lose(1, speak):
        assert report["error"] == 'rank 1 (worker 1) failed: KeyError: "a user\'s mistake"'
