"""A small run on two workers and a store, as a user starts it, and what it has learned."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import psutil

from rowhaul.checkpoint import CheckpointReader, latest_checkpoint

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


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended, reaped or not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
