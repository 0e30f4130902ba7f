"""One run at a time in a folder; the lock of a dead one is taken over."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from test_run import CONFIG

from rowhaul.errors import ConfigError
from rowhaul.train import run_lock, train_run
from rowhaul.train.run_lock import LOCK_FILE, RunLock

HOLD = """
import sys, time
from pathlib import Path
from rowhaul.train.run_lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold():
    """Hold a lock in another process."""
    started = []

    def start(folder):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], text=True, **pipes)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_run_is_refused(tmp_path, hold):
    holder = hold(tmp_path / "run")
    who = rf"in use by process {holder.pid} \(rank 0\) on {socket.gethostname()}, since 20"
    with pytest.raises(ConfigError, match=who), RunLock(tmp_path / "run"):
        pass
    holder.communicate("")
    assert not (tmp_path / "run").exists()
    with RunLock(tmp_path / "run") as lock:
        assert lock.note == ""
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
            RunLock(tmp_path / "run").__enter__()


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path, hold):
    holder = hold(tmp_path / "run")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with RunLock(tmp_path / "run") as lock:
        assert lock.note.startswith(f"took over the lock of process {holder.pid} (rank 0)")
        (tmp_path / "run" / "config.yaml").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def write_holder(folder, **changes):
    folder.mkdir()
    known = {"host": "elsewhere", "pid": 7, "started": 1.0, "rank": 0, "since": "2026-01-01 00:00:00 UTC"}
    (folder / LOCK_FILE).write_text(json.dumps({**known, **changes}))


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_run_of_another_host_is_known_by_its_beat(is_alive, tmp_path, monkeypatch):
    """As where a network file system does not pass locks on."""
    monkeypatch.setattr(run_lock, "_WATCH_SECONDS", 60.0 if is_alive else 0.3)
    write_holder(tmp_path / "run")
    ended = threading.Event()

    def beat():
        while not ended.wait(0.05):
            os.utime(tmp_path / "run" / LOCK_FILE)

    thread = threading.Thread(target=beat)
    if is_alive:
        thread.start()
        with (
            pytest.raises(ConfigError, match=r"in use by process 7 .* on elsewhere"),
            RunLock(tmp_path / "run"),
        ):
            pass
        ended.set()
        thread.join()
    else:
        with RunLock(tmp_path / "run") as lock:
            assert "took over the lock of process 7 (rank 0) on elsewhere" in lock.note


def test_a_run_of_another_host_that_ends_while_it_is_watched_has_left_the_folder_free(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_WATCH_SECONDS", 600.0)
    write_holder(tmp_path / "run")

    def end():
        (tmp_path / "run" / LOCK_FILE).unlink()
        (tmp_path / "run").rmdir()

    ending = threading.Timer(0.5, end)
    ending.start()
    with RunLock(tmp_path / "run") as lock:
        assert lock.note == ""
        assert json.loads((tmp_path / "run" / LOCK_FILE).read_text())["pid"] == os.getpid()
    ending.join()


@pytest.mark.slow
def test_where_nothing_can_be_locked_the_holder_counts(tmp_path, monkeypatch, hold):
    def unsupported(*arguments):
        raise OSError(37, "No locks available")

    holder = hold(tmp_path / "run")
    monkeypatch.setattr(run_lock.fcntl, "flock", unsupported)
    with pytest.raises(ConfigError, match=f"in use by process {holder.pid}"), RunLock(tmp_path / "run"):
        pass
    holder.kill()
    holder.wait()
    with RunLock(tmp_path / "run") as lock:
        assert f"process {holder.pid}" in lock.note


def test_the_holder_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_BEAT_SECONDS", 0.01)
    with RunLock(tmp_path / "run"):
        before = (tmp_path / "run" / LOCK_FILE).stat().st_mtime_ns
        until = time.monotonic() + 200
        while (tmp_path / "run" / LOCK_FILE).stat().st_mtime_ns == before and time.monotonic() < until:
            time.sleep(0.01)
        assert (tmp_path / "run" / LOCK_FILE).stat().st_mtime_ns != before


@pytest.mark.slow
def test_a_run_in_progress_is_not_disturbed(tmp_path, log_schema, log_folder):
    refused = []

    def second_run():
        for resume in (True, False):
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
                train_run(CONFIG, log_schema, log_folder, out=tmp_path / "run", resume=resume)
        refused.append(True)
        return len(refused) == 2

    result = train_run(CONFIG, log_schema, log_folder, out=tmp_path / "run", should_stop=second_run)
    assert (result.step, result.interrupted) == (2, True)
    assert LOCK_FILE not in {path.name for path in (tmp_path / "run").iterdir()}
    resumed = train_run(CONFIG, log_schema, log_folder, out=tmp_path / "run", resume=True)
    assert resumed.step == 48
