"""Ranks that are alive but stuck: named while the others wait, and the run goes on or ends cleanly."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess

import numpy as np
import psutil
import pytest
from cluster_runs import command, contents, rank_processes, runs, wait_for
from rank_processes import started

from rowhaul.checkpoint import latest_checkpoint

pytestmark = pytest.mark.slow

# Every rank reads the same batches with a loader of its own; rank 1's then waits at a FIFO.
BLOCKING_READER = """
import logging
from rowhaul.data.samples import Samples
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig
from rowhaul.train.distributed.setup import distribute

class Told(logging.Handler):
    def emit(self, record):
        say(notice=record.getMessage())

logging.getLogger("rowhaul").addHandler(Told())

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        table = EmbeddingBagConfig(name="t", embedding_dim=4, feature_names=["f"])
        self.rows = EmbeddingBagCollection([table])

    def forward(self, batch):
        return self.rows(batch.ids).values().sum(1)

def batches():
    for number in range(12):
        if number == 6 and rank == 1:
            say(blocks=True)
            open(os.environ["FIFO"]).read()
        if number > 6:  # the run lasts until watchdogs have seen that it goes on
            time.sleep(1)
        keys = np.arange(16, dtype=np.int64) + number
        yield Samples(("f",), keys, np.ones((1, 16), np.int32), np.zeros((16, 0), np.float32),
                      np.zeros(16, np.float32), np.arange(16) + 16 * number)

limits = Timeouts(arrival=90, stall=2, stuck=float(os.environ["STUCK"]))
try:
    with join(num_stores=1, timeouts=limits, stacks=True) as cluster:
        model = Model()
        training = distribute(cluster, model, batches())
        for batch in training.batches():
            loss = batch.loss(model(batch))
            loss.backward()
            training.step(loss)
        say(steps=training.iteration)
        training.close()
except Exception as error:
    say(error=str(error), kind=type(error).__name__)
say(ended=True)
os._exit(0)
"""


@contextlib.contextmanager
def blocked(tmp_path, stuck):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with started(BLOCKING_READER, 3, FIFO=str(fifo), STUCK=str(stuck)) as ranks:
        ranks[1].wait_for("blocks", 200)
        yield ranks, fifo


def has_notice(rank, text):
    return any(text in report.get("notice", "") for report in list(rank.reports))


def test_a_reader_that_blocks_is_named_with_its_stacks_and_the_run_goes_on(tmp_path):
    with blocked(tmp_path, stuck=0) as (ranks, fifo):
        for rank in ranks:
            wait_for(
                lambda rank=rank: has_notice(rank, "waiting for rank 1 (127.0.0.1), reading data since"), 60
            )
            wait_for(lambda rank=rank: has_notice(rank, "stacks of rank 1:"), 60)
        fifo.write_text("go on")
        reports = [rank.wait(100) for rank in ranks]
    assert [report.get("steps") for report in reports] == [12, 12, 12], reports
    assert has_notice(ranks[0], "going on after")


def test_a_run_whose_reader_blocks_for_too_long_ends_and_names_the_rank(tmp_path):
    with blocked(tmp_path, stuck=20) as (ranks, _):
        reports = [rank.wait(100) for rank in ranks]
    for report in reports:
        assert report["kind"] == "RankLostError", report
        assert report["error"].startswith("rank 1 (worker 1) has held up the others for 20 s, reading data")


@pytest.fixture
def disk(tmp_path):
    """A disk that can be frozen: writers wait in the kernel, as at a file server that is gone."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    tools = all(map(shutil.which, ("mkfs.ext4", "mount", "fsfreeze")))
    if not tools or os.geteuid() or subprocess.run(["mkfs.ext4", "-q", image]).returncode:
        pytest.skip("needs root and the tools to mount a file system")
    if subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True).returncode:
        pytest.skip("this system does not mount files")
    yield folder
    subprocess.run(["fsfreeze", "-u", folder], capture_output=True)
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_folder_that_does_not_answer_is_named_and_the_run_goes_on(log, uninterrupted, disk, tmp_path):
    out, output = disk / "run", tmp_path / "output.txt"
    settings = ("--set", "cluster.stall_after=3", "--set", "log_every=1000")
    with output.open("w") as file:
        launcher = subprocess.Popen(command(log, out, *settings), stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: latest_checkpoint(out / "checkpoints") is not None, 250)
        subprocess.run(["fsfreeze", "-f", disk], check=True, timeout=200)
        # In lines of the terminal's width.
        wait_for(lambda: "file server does not answer" in " ".join(output.read_text().split()), 200)
        subprocess.run(["fsfreeze", "-u", disk], check=True, timeout=200)
        assert launcher.wait(120) == 0
    finally:
        subprocess.run(["fsfreeze", "-u", disk], capture_output=True)
        launcher.kill()
        launcher.wait()
    text = " ".join(output.read_text().split())
    assert re.search(r"waiting for rank . \(127.0.0.1\), saving a checkpoint since \d+ s", text)
    assert "going on after" in text
    learned = contents(out)
    for name, values in uninterrupted.items():
        assert np.array_equal(learned[name], values), name


def test_a_stopped_rank_is_named_and_nothing_is_left(log, tmp_path):
    out, output = tmp_path / "run", tmp_path / "output.txt"
    with output.open("w") as file:
        launcher = subprocess.Popen(command(log, out), stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: latest_checkpoint(out / "checkpoints") is not None, 250)
        processes = psutil.Process(launcher.pid).children(recursive=True)
        os.kill(rank_processes(psutil.Process(launcher.pid))[1].pid, signal.SIGSTOP)
        assert launcher.wait(200) == 2
    finally:
        launcher.kill()
        launcher.wait()
    text = " ".join(output.read_text().split())
    assert "rank 1 (worker 1) is stopped (SIGSTOP, or Ctrl-Z) and has not run for 8 s" in text
    wait_for(lambda: not any(map(runs, processes)), 30)
