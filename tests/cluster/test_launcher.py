"""Local ranks: started with torchrun's variables, watched, and never left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from rowhaul.cluster import launch, launcher
from rowhaul.errors import ClusterError

# A rank without PyTorch: it notes who it is in the folder FOLDER and does what BEHAVIOUR says.
RANK = """
import json, os, pathlib, signal, sys, time
rank, folder = int(os.environ["RANK"]), pathlib.Path(os.environ["FOLDER"])
def note(name, text):
    path = folder / f"{name}-{rank}"
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)
def wait_for(name):
    deadline = time.monotonic() + 200
    while len(list(folder.glob(name + "-?"))) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
        time.sleep(0.02)
"""


def run(tmp_path, behaviour, num_workers=2, num_stores=1, **options):
    launch(
        ["argument"],
        num_workers,
        num_stores,
        command=[sys.executable, "-S", "-c", RANK + behaviour],
        environment={"FOLDER": str(tmp_path)},
        **options,
    )


def pids(tmp_path):
    return [int(path.read_text()) for path in sorted(tmp_path.glob("pid-?"))]


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_every_rank_finds_its_variables_and_the_arguments(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run(tmp_path, "note('env', json.dumps(dict(os.environ) | {'argv': sys.argv[1:]}))")
    found = [json.loads((tmp_path / f"env-{rank}").read_text()) for rank in range(3)]
    assert [one["RANK"] for one in found] == [one["LOCAL_RANK"] for one in found] == ["0", "1", "2"]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MASTER_ADDR"]) for one in found} == {
        ("3", "3", "127.0.0.1")
    }
    assert len({one["MASTER_PORT"] for one in found}) == 1
    assert found[0]["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
    assert all(one["argv"] == ["argument"] for one in found)


def test_threads_that_the_user_has_set_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run(tmp_path, "note('threads', os.environ['OMP_NUM_THREADS'])", num_workers=1)
    assert (tmp_path / "threads-1").read_text() == "7"


DIES = """
note("pid", str(os.getpid()))
wait_for("pid")
if rank == 1:
    print("some words on stdout", flush=True)
    print("ValueError: the last words", file=sys.stderr, flush=True)
    {end}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("end", "ending"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    ],
)
def test_a_rank_that_dies_is_named_with_its_last_words_and_the_others_end(tmp_path, end, ending):
    with pytest.raises(ClusterError) as caught:
        run(tmp_path, DIES.format(end=end))
    message = str(caught.value)
    assert message.startswith(f"rank 1 (worker 1) {ending}")
    assert "some words on stdout" in message
    assert message.endswith("ValueError: the last words")
    assert len(pids(tmp_path)) == 3
    assert not any(map(runs, pids(tmp_path)))


def test_causes_come_before_ranks_that_ended_because_of_them():
    codes = (launcher.EXIT_PEER_ENDED, 3, -signal.SIGKILL)
    ended = [
        launcher._Child(rank, "", SimpleNamespace(returncode=code), None) for rank, code in enumerate(codes)
    ]
    assert [child.rank for child in sorted(ended, key=launcher._after_causes)] == [2, 1, 0]


def test_a_rank_that_does_not_want_to_end_is_killed(tmp_path):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    with pytest.raises(ClusterError, match=r"rank 1 \(worker 1\) ended with exit code 3"):
        run(tmp_path, deaf + DIES.format(end="sys.exit(3)"), loss_seconds=0.3)
    assert not any(map(runs, pids(tmp_path)))


def interrupt(tmp_path, times):
    """Send Ctrl-C to this process once all ranks are there; and again when the first has arrived."""
    wait_until(lambda: len(pids(tmp_path)) == 3)
    os.kill(os.getpid(), signal.SIGINT)
    if times > 1:
        wait_until(lambda: len(list(tmp_path.glob("interrupted-?"))) == 3)
        os.kill(os.getpid(), signal.SIGINT)


INTERRUPTED = """
def stop(number, frame):
    note("interrupted", "")
    {then}
signal.signal(signal.SIGINT, stop)
note("pid", str(os.getpid()))
time.sleep(60)
time.sleep(60)
"""


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize(("times", "then"), [(1, "note('saved', ''); sys.exit(0)"), (2, "time.sleep(60)")])
def test_the_first_interruption_is_passed_on_and_the_second_kills(tmp_path, times, then):
    sender = threading.Thread(target=interrupt, args=(tmp_path, times))
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, INTERRUPTED.format(then=then))
    sender.join()
    assert len(list(tmp_path.glob("interrupted-?"))) == 3
    assert len(list(tmp_path.glob("saved-?"))) == (3 if times == 1 else 0)
    assert not any(map(runs, pids(tmp_path)))


# A rank that takes SIGTERM as training does: once; then it saves for longer than it may take others to die.
SAVES = """
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
note("pid", str(os.getpid()))
while not asked:
    time.sleep(0.02)
note("asked", "")
time.sleep({seconds})
note("saved", "")
sys.exit({code})
"""


def terminate(tmp_path, times, ranks_too):
    """Send SIGTERM as a service manager does: to the launcher, and to the ranks at the same time."""
    wait_until(lambda: len(pids(tmp_path)) == 3)
    os.kill(os.getpid(), signal.SIGTERM)
    for pid in pids(tmp_path) if ranks_too else ():
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: len(list(tmp_path.glob("asked-?"))) == 3)
    for _ in range(times - 1):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)


@contextlib.contextmanager
def terminated(tmp_path, times=1, ranks_too=False):
    """Send SIGTERM meanwhile; yields the list that the signal which ends the launcher is added to."""
    ended = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    sender = threading.Thread(target=terminate, args=(tmp_path, times, ranks_too))
    sender.start()
    try:
        yield ended
    finally:
        sender.join()
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.parametrize(("times", "ranks_too"), [(1, True), (3, False)])
def test_a_slow_save_survives_sigterm_however_often_it_comes(tmp_path, times, ranks_too):
    with terminated(tmp_path, times, ranks_too) as ended:
        run(tmp_path, SAVES.format(seconds=6, code="130 if rank == 0 else 0"))
    assert ended == [signal.SIGTERM]
    assert len(list(tmp_path.glob("saved-?"))) == 3
    assert not any(map(runs, pids(tmp_path)))


def test_ranks_that_do_not_end_in_the_grace_after_sigterm_are_killed(tmp_path):
    message = r"had not ended 3 s after SIGTERM.*cluster\.grace"
    with terminated(tmp_path) as ended, pytest.raises(ClusterError, match=message):
        run(tmp_path, SAVES.format(seconds=60, code=0), grace_seconds=3)
    assert not ended
    assert not any(map(runs, pids(tmp_path)))


def test_a_rank_that_fails_while_it_stops_is_named(tmp_path):
    with terminated(tmp_path), pytest.raises(ClusterError, match=r"rank 1 .* ended with exit code 2"):
        run(tmp_path, SAVES.format(seconds=0.3, code="2 if rank == 1 else 0"))


def test_ranks_that_stop_together_because_one_was_asked_to_have_not_failed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "note('saved', '')\nwait_for('saved')\nsys.exit(130 if rank < 2 else 0)")


def test_a_rank_that_fails_because_another_was_interrupted_is_an_error(tmp_path):
    with pytest.raises(ClusterError, match="ended with exit code"):
        run(tmp_path, "note('here', '')\nwait_for('here')\nsys.exit(130 if rank == 1 else 2)")


def test_a_background_job_keeps_ignoring_ctrl_c(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    sender = threading.Thread(target=interrupt, args=(tmp_path, 1))
    try:
        sender.start()
        run(tmp_path, "note('pid', str(os.getpid()))\ntime.sleep(1)\nnote('done', '')")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        sender.join()
        signal.signal(signal.SIGINT, before)
    assert len(list(tmp_path.glob("done-?"))) == 3


@contextlib.contextmanager
def launched(tmp_path, behaviour, start="-S"):
    """A launcher of three ranks, in a process and a group of its own, as a shell makes it; ends killed."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = (
        "import sys; from rowhaul.cluster import launch\n"
        f"launch([], 2, command=[sys.executable, {start!r}, '-c', {RANK + behaviour!r}])"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "FOLDER": str(tmp_path), "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not any(map(runs, pids(tmp_path))))
    assert not list(temporary.iterdir())


def test_ranks_end_and_leave_nothing_behind_when_the_launcher_is_killed(tmp_path):
    with launched(tmp_path, "note('pid', str(os.getpid()))\ntime.sleep(100)"):
        wait_until(lambda: len(pids(tmp_path)) == 3)
        assert all(map(runs, pids(tmp_path)))


# Each rank has a process of its own beside it, as a watchdog is, and ends when it is told to.
HAS_CHILD = """
import subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
note("child", str(child.pid))
note("pid", str(os.getpid()))
while not (folder / "go").exists():
    time.sleep(0.02)
child.kill()
"""


def stopped(launcher):
    """How many of a launcher, its ranks and their children are stopped, and how many there are."""
    main = psutil.Process(launcher.pid)
    states = [one.status() for one in (main, *main.children(recursive=True))]
    return states.count(psutil.STATUS_STOPPED), len(states)


def test_ctrl_z_stops_the_ranks_too_until_the_launcher_goes_on(tmp_path):
    with launched(tmp_path, HAS_CHILD) as launcher:
        wait_until(lambda: len(pids(tmp_path)) == 3)
        for _ in range(2):
            launcher.send_signal(signal.SIGTSTP)
            wait_until(lambda: stopped(launcher) == (7, 7))
            launcher.send_signal(signal.SIGCONT)
            wait_until(lambda: stopped(launcher) == (0, 7))
        (tmp_path / "go").touch()
        assert launcher.wait(200) == 0


def test_a_launcher_that_is_killed_while_it_is_stopped_leaves_nothing_behind(tmp_path):
    with launched(tmp_path, HAS_CHILD) as launcher:
        wait_until(lambda: len(pids(tmp_path)) == 3)
        launcher.send_signal(signal.SIGTSTP)
        wait_until(lambda: stopped(launcher) == (7, 7))
    children = [int(path.read_text()) for path in tmp_path.glob("child-?")]
    assert len(children) == 3
    wait_until(lambda: not any(map(runs, children)))


# Waits at the launcher's store for what never comes, for longer than an answer may take.
WAITS_AT_THE_STORE = """
from datetime import timedelta
from rowhaul.cluster import place, rendezvous, secret, store_client
store_client._GRACE_SECONDS = 1.0
where = place.Place.from_environment()
store = rendezvous.reach_store(where, secret.load_secret(None), 60.0)[0]
note("pid", str(os.getpid()))
try:
    store.wait(["never"], timedelta(seconds=4))
except RuntimeError as error:
    note("told", str(error))
"""


@pytest.mark.slow
def test_the_time_for_which_ctrl_z_stops_a_rank_and_the_store_does_not_count(tmp_path):
    with launched(tmp_path, WAITS_AT_THE_STORE, start="-u") as launcher:
        wait_until(lambda: len(pids(tmp_path)) == 3)
        launcher.send_signal(signal.SIGTSTP)
        wait_until(lambda: stopped(launcher) == (4, 4))
        time.sleep(6)
        launcher.send_signal(signal.SIGCONT)
        assert launcher.wait(200) == 0
    told = [path.read_text() for path in tmp_path.glob("told-?")]
    assert told == ["waited 4 s for never"] * 3


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ClusterError, match="number of workers must be at least 1; got 0"):
        launch([], 0)
    with pytest.raises(ClusterError, match="number of stores must be at least 1"):
        launch([], 2, 0)
