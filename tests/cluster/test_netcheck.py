"""`rowhaul netcheck` starts local ranks, and shows where they are and how they reach each other."""

import json
import os
import subprocess
import sys

import pytest

from rowhaul.cli.netcheck import netcheck
from rowhaul.errors import ConfigError


@pytest.mark.slow
def test_local_ranks_are_started_measured_and_shown():
    names = ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    options = ["--workers", "2", "--seconds-per-pair", "0.05", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "rowhaul", "netcheck", *options],
        env={name: value for name, value in os.environ.items() if name not in names},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert all(one["interface"].startswith("lo") for one in found["ranks"])
    assert found["has_secret"]  # the launcher has made one
    listens = [one for rank in found["ranks"] for one in rank["listens"]]
    assert {one["what"] for one in listens} >= {"Gloo", "launcher's store"}
    assert all(one["reach"] == "this host only" and one["address"] == "127.0.0.1" for one in listens)
    (pair,) = found["pairs"]
    assert pair["ranks"] == [0, 1]
    assert all(pair[name] > 0 for name in pair if name != "ranks")


def test_workers_cannot_be_started_under_torchrun(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun has started them already"):
        netcheck(workers=2, interface=None, secret_file=None, seconds_per_pair=0.1, as_json=False)
