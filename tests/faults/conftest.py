"""Data, and a run on it that nothing disturbs."""

from __future__ import annotations

import subprocess

import pytest
from cluster_runs import command, contents, generated


@pytest.fixture(scope="session")
def log(tmp_path_factory):
    return generated(tmp_path_factory.mktemp("log") / "data", 8000)


@pytest.fixture(scope="session")
def uninterrupted(log, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    done = subprocess.run(command(log, out), timeout=450, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return contents(out)
