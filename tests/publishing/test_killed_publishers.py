"""Trainers that are killed while they publish, real servers beside them, and a cluster."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from published_rows import exported, rows_of, weights_of

from rowhaul.serve import Scorer

pytestmark = pytest.mark.slow


def train(tmp_path, log, *more):
    command = [sys.executable, "-m", "rowhaul", "train", "--data", str(log), "--out", str(tmp_path / "run")]
    command += ["--batch-size", "100", "--embedding-dim", "4", "--publish", str(tmp_path / "served")]
    command += ["--publish-every", "3", "--checkpoint-every", "7", "--set", "publish.compact_after=4"]
    command += ["--set", "tables.default.ttl=9", "--set", "model.options.top=[16]", *more]
    with (tmp_path / "train.log").open("w") as log_file:
        return subprocess.Popen(command, stdout=log_file, stderr=subprocess.STDOUT)


def finish(process, tmp_path):
    assert process.wait(500) == 0, (tmp_path / "train.log").read_text()


def published(tmp_path):
    path = tmp_path / "served" / "served.json"
    return json.loads(path.read_text())["published"] if path.exists() else None


def wait_for(condition, process, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            pytest.fail(f"the process ended with exit code {process.returncode}")
        assert time.monotonic() < end
        time.sleep(0.02)


def test_after_kills_base_and_deltas_are_what_the_run_knows(tmp_path, log_folder):
    chance, resume, command = random.Random(3), [], [sys.executable, "-m", "rowhaul", "serve"]
    server = process = None
    try:
        for _ in range(2):
            process, before = train(tmp_path, log_folder, "--epochs", "30", *resume), published(tmp_path)
            wait_for(lambda before=before: published(tmp_path) not in (None, before), process)
            if server is None:
                command += [str(tmp_path / "served"), "--port", "0", "--workers", "2", "--refresh", "0.2"]
                server = subprocess.Popen(
                    command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "300"}
                )
            time.sleep(chance.random())
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert Scorer(tmp_path / "served").step >= 0  # what is there can be read
            resume = ["--resume"]
        process = train(tmp_path, log_folder, "--epochs", "30", "--set", "max_steps=160", *resume)
        finish(process, tmp_path)
        scorer, expected = Scorer(tmp_path / "served"), exported(tmp_path / "run", tmp_path / "exported")
        assert scorer.step == expected.step == 160
        assert rows_of(scorer) == rows_of(expected)
        url = next(word for line in server.stdout for word in line.split() if word.startswith("http"))
        health = url.rpartition("/docs")[0] + "/healthz"
        wait_for(lambda: all(step_of(health) == 160 for _ in range(6)), server)  # of both processes
    finally:
        process.kill()
        if server is not None:
            server.terminate()
            server.wait(200)
            server.stdout.close()


def step_of(url):
    with urllib.request.urlopen(url, timeout=200) as answer:
        return json.loads(answer.read())["step"]


def test_a_cluster_that_is_killed_publishes_on(tmp_path, log_folder):
    """Versions come by the clock, more often than checkpoints; all ranks write the rows that they have."""
    settings = ["--workers", "2", "--epochs", "30", "--publish-every", "0.2s", "--checkpoint-every", "20"]
    process = train(tmp_path, log_folder, *settings)
    wait_for(lambda: len(list((tmp_path / "served").glob("delta-*/delta.json"))) > 3, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = Scorer(tmp_path / "served")  # what is there can be read
    end = before.step + 20
    finish(train(tmp_path, log_folder, *settings, "--set", f"max_steps={end}", "--resume"), tmp_path)
    every = (tmp_path / "served").glob("delta-*/delta.json")
    steps = [json.loads(one.read_text())["step"] for one in every]
    assert any(step % 20 for step in steps), "only checkpoints were published"
    assert len(list((tmp_path / "served").glob("delta-*/rows-r0001.bin"))) > 3
    scorer, expected = Scorer(tmp_path / "served"), exported(tmp_path / "run", tmp_path / "exported")
    assert scorer.step == expected.step == end
    assert rows_of(scorer) == rows_of(expected)
    deltas = published(tmp_path)["deltas"]
    newest = tmp_path / "served" / deltas[-1]["folder"] if deltas else scorer.folder.rows.path.parent
    assert weights_of(newest / "dense.onnx") == weights_of(expected.folder.rows.path.parent / "dense.onnx")
