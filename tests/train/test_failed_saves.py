"""A checkpoint that cannot be written does not end a run, unless it is the last."""

import json
import resource
import shutil
import subprocess
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
from test_damaged_checkpoints import Notes
from test_run import CONFIG
from test_trainer import state_bytes

from rowhaul.checkpoint.layout import finished_checkpoints
from rowhaul.errors import CheckpointError
from rowhaul.train import load_trained, train_run
from save_threads import wait_for_saves

# TensorBoard's own thread ends with an error, too, and another is started.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
CONFIG = replace(CONFIG, log_every=1)


def at_steps(actions):
    """Do something after certain steps of a run."""
    steps = iter(range(1, 10**6))

    def act():
        wait_for_saves()
        actions.get(next(steps), lambda: None)()
        return False

    return act


def limit_files(num_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def _unlimited():
    yield
    limit_files(resource.RLIM_INFINITY)
    for thread in threading.enumerate():  # one that ended later would fail the next test
        if type(thread).__module__.startswith("tensorboard."):
            thread.join(10)


@pytest.mark.usefixtures("_unlimited")
def test_a_failed_save_is_tried_again(tmp_path, log_schema, log_folder):
    notes, folder = Notes(), tmp_path / "b"

    def while_full():
        kept = [path.name for path in (folder / "checkpoints").iterdir()]
        assert kept == ["step-000000007"]
        load_trained(folder)
        limit_files(resource.RLIM_INFINITY)

    actions = at_steps({10: lambda: limit_files(4096), 16: while_full})
    train_run(CONFIG, log_schema, log_folder, out=folder, listener=notes, should_stop=actions)
    (note,) = notes.texts
    assert note.startswith("the checkpoint of step 14 failed, training goes on: ")
    assert "File too large" in note
    assert "the newest is of step 7" in note
    assert [one.name for one in finished_checkpoints(folder / "checkpoints")] == [
        "step-000000042",
        "step-000000048",
    ]
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "a")
    assert state_bytes(load_trained(tmp_path / "a")) == state_bytes(load_trained(folder))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} >= {*range(1, 10), *range(20, 49)}


@pytest.mark.usefixtures("_unlimited")
def test_the_last_save_must_succeed(tmp_path, log_schema, log_folder):
    actions = at_steps({44: lambda: limit_files(4096)})
    with pytest.raises(CheckpointError, match=r"File too large.*the newest is of step 42"):
        train_run(CONFIG, log_schema, log_folder, out=tmp_path / "a", should_stop=actions)
    limit_files(resource.RLIM_INFINITY)
    names = sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir())
    assert names == ["step-000000035", "step-000000042"]


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "rowhaul-test", str(disk)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted only by root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_a_full_disk(small_disk, tmp_path, log_schema, log_folder):
    notes, folder, filler = Notes(), small_disk / "run", small_disk / "filler"

    def fill():
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def while_full():
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000000007"]
        load_trained(folder)
        filler.unlink()

    actions = at_steps({10: fill, 23: while_full})
    train_run(CONFIG, log_schema, log_folder, out=folder, listener=notes, should_stop=actions)
    failed = [text for text in notes.texts if text.startswith("the checkpoint of step")]
    assert len(failed) == 2  # of steps 14 and 21
    assert all("No space left on device" in note for note in notes.texts)
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "a")
    assert state_bytes(load_trained(tmp_path / "a")) == state_bytes(load_trained(folder))
