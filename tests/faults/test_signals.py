"""SIGTERM and Ctrl-C, to a launcher and to its ranks: the run is saved once, and resumes to the same bits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

import numpy as np
import psutil
import pytest
from cluster_runs import RANKS, command, contents, rank_processes, runs, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("default_sigint")]


@contextlib.contextmanager
def training(log, out, folder):
    """A run that has begun to train; yields its launcher and its ranks."""
    with (folder / "output.txt").open("w") as file:
        launcher = subprocess.Popen(
            command(log, out, "--set", "log_every=1"), stdout=file, stderr=subprocess.STDOUT
        )
    started: list[psutil.Process] = []
    try:
        metrics = out / "metrics.jsonl"
        # Until a rank's first step is over a signal interrupts it: there is nothing to save.
        wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 2, 250)
        started += psutil.Process(launcher.pid).children(recursive=True)
        yield launcher, rank_processes(psutil.Process(launcher.pid))
    finally:
        launcher.kill()
        launcher.wait()
    assert len(started) == 2 * len(RANKS)  # each with its watchdog, which ends after it
    wait_for(lambda: not any(map(runs, started)), 30)


def to_all(launcher, ranks, number):
    """Send a signal as systemd does: to every process of the service."""
    for pid in (launcher.pid, *(process.pid for process in ranks.values())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def once_to_all(launcher, ranks):
    to_all(launcher, ranks, signal.SIGTERM)


def twice_to_all(launcher, ranks):
    to_all(launcher, ranks, signal.SIGTERM)
    time.sleep(0.1)
    to_all(launcher, ranks, signal.SIGTERM)


def ctrl_c_to_all(launcher, ranks):
    to_all(launcher, ranks, signal.SIGINT)


@pytest.mark.parametrize(
    ("send", "code"),
    [(once_to_all, -signal.SIGTERM), (twice_to_all, -signal.SIGTERM), (ctrl_c_to_all, 130)],
)
def test_a_stopped_run_is_saved_and_resumes_to_the_same_bits(send, code, log, uninterrupted, tmp_path):
    out = tmp_path / "run"
    with training(log, out, tmp_path) as (launcher, ranks):
        assert sorted(ranks) == sorted(RANKS.values())
        send(launcher, ranks)
        assert launcher.wait(120) == code
    text = (tmp_path / "output.txt").read_text()
    assert text.count("stopping after this step") == 1
    assert "Stopped and saved. To continue: rowhaul train --resume" in text
    assert "error" not in text
    assert "interrupted" not in text
    resumed = subprocess.run(command(log, out, "--resume"), timeout=250, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    learned = contents(out)
    assert learned.keys() == uninterrupted.keys()
    for name, values in uninterrupted.items():
        assert np.array_equal(learned[name], values), name


def test_a_second_ctrl_c_ends_the_run_at_once(log, tmp_path):
    with training(log, tmp_path / "run", tmp_path) as (launcher, ranks):
        os.kill(ranks[1].pid, signal.SIGSTOP)  # nothing is saved while one rank does not take part
        os.kill(launcher.pid, signal.SIGINT)
        wait_for(lambda: "stopping after this step" in (tmp_path / "output.txt").read_text(), 60)
        os.kill(launcher.pid, signal.SIGINT)
        assert launcher.wait(200) == 130
    text = (tmp_path / "output.txt").read_text()
    assert "interrupted: the ranks were killed; nothing was saved since the last checkpoint" in text
    assert "Stopped and saved" not in text
