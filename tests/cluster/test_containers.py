"""Containers on one host network: each has files of its own, and perhaps users, but they share a kernel."""

import os
import subprocess
import sys

import pytest

from rowhaul._ports import free_port

pytestmark = pytest.mark.slow


def can_mount():
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "log"
    command = ["generate", "--rows", "3000", "--out", str(folder)]
    subprocess.run([sys.executable, "-m", "rowhaul", *command], check=True, capture_output=True, timeout=300)
    return folder


def train(log, tmp_path):
    """Train with two ranks, each with a temporary folder that it alone can see."""
    own = tmp_path / "own"
    own.mkdir()
    command = f"mount -t tmpfs none {own} && exec {sys.executable} -m rowhaul train --data {log}"
    command += " --batch-size 256 --max-steps 4 --topology colocated"
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment |= {"TMPDIR": str(own), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            ["unshare", "-m", "sh", "-c", command],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [(process.communicate(timeout=200)[0], process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.skipif(not can_mount(), reason="needs root")
def test_containers_with_folders_of_their_own_train_as_one_host(log, tmp_path):
    for output, code in train(log, tmp_path):
        assert code == 0, output
        assert "uses the network" not in output
