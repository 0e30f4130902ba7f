"""`rowhaul netcheck` starts local ranks, and shows where they are and how they reach each other."""

import json
import os
import subprocess
import sys

import pytest

from rowhaul.cli.netcheck import netcheck
from rowhaul.errors import ConfigError, SecretError


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


# Two ranks of a network of their own, with an interface beside the loopback.
NETWORK = """
ip link set lo up && ip link add outside0 type veth peer name other0
ip link set outside0 up && ip link set other0 up
ip address add 10.77.0.1/24 dev outside0
export MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 WORLD_SIZE=2
RANK=1 $PYTHON -m rowhaul netcheck --seconds-per-pair 0.05 --secret-file $SECRET_FILE >&2 &
RANK=0 $PYTHON -m rowhaul netcheck --seconds-per-pair 0.05 --secret-file $SECRET_FILE --json
"""


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode != 0, reason="needs root"
)
def test_everything_listens_on_the_chosen_interface_only(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a secret of two ranks 7af3")
    secret.chmod(0o600)
    names = ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", NETWORK],
        env={**environment, "PYTHON": sys.executable, "SECRET_FILE": str(secret)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    listens = [one for rank in found["ranks"] for one in rank["listens"]]
    assert {one["what"] for one in listens} >= {"Gloo", "rendezvous store"}
    assert {(one["address"], one["reach"]) for one in listens} == {("10.77.0.1", "outside0")}
    assert found["has_secret"]
    assert secret.read_text() not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("mode", "text", "says"),
    [
        (0o644, "a secret of two ranks 7af3", "is open to all users (mode 0644)"),
        (0o600, "", "is empty; it needs at least 16"),
        (0o600, None, "cannot be read: No such file or directory"),
    ],
)
def test_a_bad_secret_file_is_refused_before_ranks_start(tmp_path, mode, text, says):
    path = tmp_path / "secret"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(SecretError) as caught:
        netcheck(workers=2, interface=None, secret_file=str(path), seconds_per_pair=0.1, as_json=False)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
