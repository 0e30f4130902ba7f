"""A small run on two workers and a store, as a user starts it, and what it has learned."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from testbed.chaos.learned import Learned, learned

STEPS = 100
RANKS = {"worker 0": 0, "worker 1": 1, "store 0": 2}


def command(data: Path, out: Path, *more: str) -> list[str]:
    settings = ["--batch-size", "64", "--max-steps", str(STEPS), "--checkpoint-every", "10"]
    cluster = ["--workers", "2", "--stores", "1", "--cache", "600", "--look-ahead", "1"]
    model = ["--embedding-dim", "4", "--set", "model.options.top=[8]", "--set", "model.options.bottom=[8]"]
    return [
        *(sys.executable, "-m", "rowhaul", "train", "--data", str(data), "--out", str(out)),
        *settings, *cluster, *model, *more,
    ]  # fmt: skip


def generated(folder: Path, num_rows: int) -> Path:
    """Write a log of clicks; return its folder."""
    generate = [sys.executable, "-m", "rowhaul", "generate", "--rows", str(num_rows), "--out", str(folder)]
    subprocess.run(generate, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return folder


def contents(out: Path) -> Learned:
    """Everything that a finished run has learned, by name."""
    found = learned(out)
    assert found["step"] == STEPS
    return found


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
