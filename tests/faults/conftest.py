"""Data, and a run on it that nothing disturbs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cluster_runs import command, contents


@pytest.fixture(scope="session")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log") / "data"
    generate = [sys.executable, "-m", "rowhaul", "generate", "--rows", "5000", "--out", str(folder)]
    subprocess.run(generate, check=True, timeout=100, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="session")
def uninterrupted(log, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    done = subprocess.run(command(log, out), timeout=250, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return contents(out)
