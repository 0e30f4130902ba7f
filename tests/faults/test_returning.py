"""Ranks that come back without a person: restarted by torchrun, or with fewer machines than before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cluster_runs import generated

from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed.resuming import fit_to_workers

STEPS = 150
OPTIONS = [
    *("--batch-size", "64", "--max-steps", str(STEPS), "--cache", "600", "--embedding-dim", "4"),
    *("--checkpoint-every", "10", "--set", "log_every=1", "--stores", "1", "--look-ahead", "1"),
    *("--set", "model.options.top=[8]", "--set", "model.options.bottom=[8]"),
]


def train(data: Path, out: Path, *more: str) -> list[str]:
    return ["train", "--data", str(data), "--out", str(out), "--resume", *OPTIONS, *more]


def logged(out: Path) -> list[dict]:
    if not (out / "metrics.jsonl").exists():
        return []
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_step(out: Path) -> int:
    return max((line["step"] for line in logged(out)), default=0)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return generated(tmp_path_factory.mktemp("log") / "data", 12000)


@pytest.mark.slow
def test_torchrun_restarts_a_lost_rank_and_the_run_ends_by_itself(log, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [*torchrun, "--max-restarts", "3", "-m", "rowhaul", *train(log, tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output.txt").open("w") as output:
        agent = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + 150
        while last_step(tmp_path / "run") < 30:
            assert time.monotonic() < deadline, (tmp_path / "output.txt").read_text()
            time.sleep(0.02)
        ranks = [one for one in psutil.Process(agent.pid).children(recursive=True) if is_rank(one, 1)]
        ranks[0].send_signal(signal.SIGKILL)
        assert agent.wait(200) == 0, (tmp_path / "output.txt").read_text()
    finally:
        agent.terminate()
        agent.wait()
    steps = [line["step"] for line in logged(tmp_path / "run") if line["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))


def is_rank(process: psutil.Process, number: int) -> bool:
    try:
        return process.environ().get("RANK") == str(number) and "rowhaul" in process.cmdline()
    except psutil.Error:
        return False


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_machines_and_says_what_changed(log, tmp_path):
    launch = [sys.executable, "-m", "rowhaul"]
    before = train(log, tmp_path / "run", "--workers", "3", "--shares", "2,1,1", "--max-steps", "20")
    subprocess.run([*launch, *before], check=True, timeout=300, capture_output=True)
    after = train(log, tmp_path / "run", "--workers", "2", "--shares", "2,1,1")
    done = subprocess.run([*launch, *after], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert last_step(tmp_path / "run") == STEPS
    notes = " ".join(line["text"] for line in logged(tmp_path / "run") if line["kind"] == "note")
    assert "cluster.shares 2,1,1 is not for 2 workers: equal from now on" in notes
    assert "num_workers: 2 here, 3 there" in notes
    assert "num_workers: 2 here, 3 there" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("shares", "links", "kept"),
    [
        ("2,1,1", "equal", ("equal", "equal")),
        ("2,1", "1gbit*2", ("2,1", "1gbit*2")),
        ("auto", "50mbit*2,5mbit", ("auto", "equal")),
        ("equal", "1gbit", ("equal", "1gbit")),
    ],
)
def test_settings_for_another_number_of_workers_are_dropped(shares, links, kept):
    settings, notes = fit_to_workers(ClusterConfig(workers=2, shares=shares, links=links), 2)
    assert (settings.shares, settings.links) == kept
    assert len(notes) == (shares != kept[0]) + (links != kept[1])
