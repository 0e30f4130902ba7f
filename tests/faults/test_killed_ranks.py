"""A rank killed while it trains: it is named, everything ends, and the run goes on to the same bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from rowhaul.checkpoint import CheckpointReader, latest_checkpoint

pytestmark = pytest.mark.slow

STEPS = 60
RANKS = {"worker 0": 0, "worker 1": 1, "store 0": 2}


def command(data: Path, out: Path, *more: str) -> list[str]:
    settings = ["--batch-size", "64", "--max-steps", str(STEPS), "--checkpoint-every", "10"]
    cluster = ["--workers", "2", "--stores", "1", "--cache", "600", "--look-ahead", "1"]
    model = ["--embedding-dim", "4", "--set", "model.options.top=[8]", "--set", "model.options.bottom=[8]"]
    return [
        *(sys.executable, "-m", "rowhaul", "train", "--data", str(data), "--out", str(out)),
        *settings, *cluster, *model, *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log") / "data"
    generate = [sys.executable, "-m", "rowhaul", "generate", "--rows", "5000", "--out", str(folder)]
    subprocess.run(generate, check=True, timeout=100, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(log, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    done = subprocess.run(command(log, out), timeout=250, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return contents(out)


def contents(out: Path) -> dict[str, np.ndarray]:
    """Everything that was learned, by name."""
    reader = CheckpointReader(latest_checkpoint(out / "checkpoints"))
    assert reader.facts["step"] == STEPS
    learned = {f"dense {name}": tensor.numpy() for name, tensor in reader.tensors("model").items()}
    for name in reader.tables:
        blocks = list(reader.rows(name))
        keys = np.concatenate([keys for keys, _ in blocks])
        records = np.concatenate([records for _, records in blocks])
        order = np.argsort(keys)
        learned[f"keys {name}"], learned[f"records {name}"] = keys[order], records[order]
    return learned


def rank_processes(launcher: psutil.Process) -> dict[int, psutil.Process]:
    """The ranks that a launcher has started, by number."""
    found = {}
    for child in launcher.children(recursive=True):
        try:
            found[int(child.environ()["RANK"])] = child
        except (psutil.Error, KeyError):
            continue
    return found


def wait_for(happened, seconds: float):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("victim", "seed"), [("worker 1", 1), ("store 0", 2)])
def test_a_killed_rank_is_named_and_the_run_goes_on_to_the_same_bits(
    victim, seed, log, uninterrupted, tmp_path
):
    out = tmp_path / "run"
    errors = tmp_path / "stderr.txt"
    with errors.open("w") as file:
        launcher = subprocess.Popen(command(log, out), stdout=subprocess.DEVNULL, stderr=file)
    try:
        # Somewhere after the first checkpoint, while later steps are trained or saved.
        wait_for(lambda: latest_checkpoint(out / "checkpoints") is not None, 200)
        ranks = rank_processes(psutil.Process(launcher.pid))
        assert sorted(ranks) == sorted(RANKS.values())
        time.sleep(random.Random(seed).random() / 4)
        os.kill(ranks[RANKS[victim]].pid, signal.SIGKILL)
        code = launcher.wait(60)
    finally:
        launcher.kill()
        launcher.wait()
    message = " ".join(errors.read_text().split())
    assert code == 2
    assert f"rank {RANKS[victim]} ({victim}) was killed by SIGKILL" in message
    assert not any(process.is_running() for process in ranks.values())
    resumed = subprocess.run(command(log, out, "--resume"), timeout=250, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    learned = contents(out)
    assert learned.keys() == uninterrupted.keys()
    for name, values in uninterrupted.items():
        assert np.array_equal(learned[name], values), name
