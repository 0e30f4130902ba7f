"""A rank killed while it trains: it is named, everything ends, and the run goes on to the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

import numpy as np
import psutil
import pytest
from cluster_runs import RANKS, command, contents, rank_processes, wait_for

from rowhaul.checkpoint import latest_checkpoint

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("victim", "seed"), [("worker 1", 1), ("store 0", 2)])
def test_a_killed_rank_is_named_and_the_run_goes_on_to_the_same_bits(
    victim, seed, log, uninterrupted, tmp_path
):
    kill_and_resume(victim, seed, log, tmp_path, uninterrupted)


def test_a_killed_run_within_a_budget_goes_on_to_the_same_bits(log, tmp_path):
    """Rows change hands after every second step or so, before and after it is killed."""
    budget = ("--set", "prune.budget=40KiB", "--set", "cluster.hot_rows=10")
    whole = tmp_path / "whole"
    subprocess.run(command(log, whole, *budget), check=True, timeout=200, capture_output=True)
    kill_and_resume("worker 1", 3, log, tmp_path, contents(whole), *budget)


def test_a_killed_run_whose_rows_stay_at_home_goes_on_to_the_same_bits(log, tmp_path):
    at_home = ("--colocated", "--sync", "at-home", "--cache", "1GiB", "--batch-size", "50")
    whole = tmp_path / "whole"
    subprocess.run(command(log, whole, *at_home), check=True, timeout=200, capture_output=True)
    workers = {"worker 0": 0, "worker 1": 1}
    kill_and_resume("worker 0", 4, log, tmp_path, contents(whole), *at_home, roles=workers)


def kill_and_resume(victim, seed, log, tmp_path, expected, *more, roles=RANKS):
    """Kill a rank some time after the first checkpoint, and resume: the run learns what was expected."""
    out = tmp_path / "run"
    errors = tmp_path / "stderr.txt"
    with errors.open("w") as file:
        launcher = subprocess.Popen(command(log, out, *more), stdout=subprocess.DEVNULL, stderr=file)
    try:
        # Somewhere after the first checkpoint, while later steps are trained or saved.
        wait_for(lambda: latest_checkpoint(out / "checkpoints") is not None, 200)
        ranks = rank_processes(psutil.Process(launcher.pid))
        assert sorted(ranks) == sorted(roles.values())
        time.sleep(random.Random(seed).random() / 4)
        os.kill(ranks[roles[victim]].pid, signal.SIGKILL)
        code = launcher.wait(200)
    finally:
        launcher.kill()
        launcher.wait()
    message = " ".join(errors.read_text().split())
    assert code == 2
    assert f"rank {roles[victim]} ({victim}) was killed by SIGKILL" in message
    assert f"rowhaul train --resume --out {out}" in message
    assert message.count("error:") == 1  # said once, by the launcher
    assert "Ctrl-C" not in message
    assert not any(process.is_running() for process in ranks.values())
    resumed = subprocess.run(
        command(log, out, "--resume", *more), timeout=250, capture_output=True, text=True
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    learned = contents(out)
    assert learned.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(learned[name], values), name
