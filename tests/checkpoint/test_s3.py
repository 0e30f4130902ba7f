"""Checkpoints on a real S3 server, run here: whole runs, broken uploads, and what a user gets wrong."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from unittest.mock import patch

import fsspec
import numpy as np
import pytest
from s3_server import S3Server

from rowhaul.checkpoint import CheckpointReader, CheckpointWriter, latest_checkpoint
from rowhaul.checkpoint.layout import finished_checkpoints, remove_unfinished
from rowhaul.checkpoint.location import as_place, storage_of
from rowhaul.checkpoint.opening import open_checkpoint
from rowhaul.cli import main
from rowhaul.errors import CheckpointError, StorageError

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytestmark = pytest.mark.slow
ROOT = "s3://models/run"


@pytest.fixture(scope="module")
def server():
    started = S3Server()
    yield started
    started.close()


@pytest.fixture
def s3(server, monkeypatch):
    """An empty bucket; returns the proxy before it."""
    known = {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3")
    files.clear_instance_cache()
    files = fsspec.filesystem("s3")
    files.mkdir("models")
    yield server.proxy
    server.proxy.cut_after, server.proxy.denies = None, False
    files.invalidate_cache()
    files.rm("models", recursive=True)
    files.clear_instance_cache()


def save(step, num_rows=1000):
    with CheckpointWriter(f"{ROOT}/step-{step:09d}") as writer:
        rows = np.repeat(np.arange(num_rows, dtype=np.float32)[:, None], 4, axis=1)
        writer.table("t", [(np.arange(num_rows), rows)], 4, 0, "float32")
        writer.facts["step"] = step


def names():
    files = fsspec.filesystem("s3")
    files.invalidate_cache()
    return sorted(files.find("models"))


@pytest.mark.usefixtures("s3")
def test_what_is_uploaded_is_read():
    save(1)
    save(2, 3_000_000)  # more than one part of an upload
    reader = open_checkpoint(ROOT)
    reader.verify()
    keys = np.concatenate([keys for keys, _ in reader.rows("t")])
    assert (keys == np.arange(3_000_000)).all()
    assert [one.name for one in finished_checkpoints(ROOT)] == ["step-000000001", "step-000000002"]


def test_an_upload_that_breaks_off_is_no_checkpoint(s3):
    save(1)
    s3.cut_after = s3.num_bytes + 200_000
    with pytest.raises(CheckpointError, match=r"step-000000002/rows-.* cannot be written"):
        save(2, 100_000)
    assert s3.num_cut > 1  # it was tried again
    s3.cut_after = None
    assert latest_checkpoint(ROOT).name == "step-000000001"
    CheckpointReader(latest_checkpoint(ROOT)).verify()
    fsspec.filesystem("s3").pipe("models/run/step-000000003/rows-0000-00000.safetensors", b"half")
    save(2, 100_000)
    remove_unfinished(ROOT)
    assert [name.split("/")[2] for name in names()] == ["step-000000001"] * 2 + ["step-000000002"] * 2


def test_a_connection_that_breaks_once_does_no_harm(s3):
    s3.cut_after = s3.num_bytes + 100_000

    def blocks():
        yield np.arange(10), np.zeros((10, 4), np.float32)

    with CheckpointWriter(f"{ROOT}/step-000000001") as writer:
        for number in range(40):
            writer.arrays(f"part-{number}", {"a": np.zeros(1000)})
            if s3.num_cut:
                s3.cut_after = None
        assert s3.num_cut or s3.num_bytes
        writer.table("t", blocks(), 4, 0, "float32")
    CheckpointReader(f"{ROOT}/step-000000001").verify()


def test_what_a_user_gets_wrong_is_one_line(s3, monkeypatch):
    place = as_place("s3://nowhere/run")
    with pytest.raises(StorageError, match=r"^s3://nowhere/run.*bucket does not exist; create the bucket"):
        storage_of(place).check_writable(place, "probe")
    s3.denies = True
    with pytest.raises(StorageError, match=r"^s3://models/run.*access denied .*check the credentials"):
        storage_of(as_place(ROOT)).check_writable(as_place(ROOT), "probe")
    with pytest.raises(StorageError, match="access denied"):
        open_checkpoint(ROOT)
    s3.denies = False
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(StorageError, match=r"no valid credentials .*set them"):
        open_checkpoint(ROOT)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "again")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(StorageError, match=r"the storage does not answer as it should: .*127\.0\.0\.1:9"):
        open_checkpoint(ROOT)
    monkeypatch.undo()
    fsspec.filesystem("s3").clear_instance_cache()


@pytest.mark.parametrize("cut", [False, True])
def test_a_run_outlives_an_outage(cut, s3, tmp_path, log_schema, log_folder):
    from test_damaged_checkpoints import Notes
    from test_failed_saves import at_steps
    from test_run import CONFIG
    from test_trainer import state_bytes

    from rowhaul.train import load_trained, train_run

    def begin_outage():
        s3.cut_after = s3.num_bytes + 20_000 if cut else 0

    def end_outage():
        s3.cut_after = None
        assert latest_checkpoint(ROOT).name == "step-000000007"

    config, notes = replace(CONFIG, checkpoints=ROOT), Notes()
    actions = at_steps({10: begin_outage, 16: end_outage})
    train_run(config, log_schema, log_folder, out=tmp_path / "a", listener=notes, should_stop=actions)
    (note,) = notes.texts
    assert note.startswith("the checkpoint of step 14 failed, training goes on: ")
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "b")
    assert state_bytes(load_trained(ROOT)) == state_bytes(load_trained(tmp_path / "b"))
    steps = {name.split("/")[2] for name in names()}
    assert steps == {"step-000000042", "step-000000048"}  # nothing is left of the broken upload


def rowhaul(*arguments, code=0):
    """Run a command, in this process if it starts no others; returns what it says."""
    given = list(map(str, arguments))
    if "--workers" in given:
        command = [sys.executable, "-m", "rowhaul", *given]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout + done.stderr
    said, found = io.StringIO(), 0
    with redirect_stdout(said), redirect_stderr(said), patch.object(sys, "argv", ["rowhaul", *given]):
        try:
            main()
        except SystemExit as end:
            found = end.code or 0
    assert found == code, said.getvalue()
    return said.getvalue()


@pytest.mark.usefixtures("s3")
def test_ranks_need_no_folder_in_common(tmp_path, log_folder):
    """Three ranks upload their shards; a fresh machine resumes, and every command takes the URL."""
    small = (
        "--batch-size",
        "500",
        "--embedding-dim",
        "4",
        "--set",
        "model.options.top=[16]",
        "--epochs",
        "2",
    )
    data, cluster = (
        ("--data", log_folder / "*.parquet"),
        ("--workers", "2", "--stores", "1", "--cache", "2000"),
    )
    at_url = ("--checkpoints", ROOT)
    settings = ("--out", tmp_path / "a", *at_url, *small, *cluster, "--max-steps", "10")
    rowhaul("train", *data, *settings)
    assert not (tmp_path / "a" / "checkpoints").exists()
    assert any("-r0001-" in name or "-r0002-" in name for name in names())
    refused = rowhaul("train", *data, "--out", tmp_path / "c", *at_url, *small, code=2)
    assert "has checkpoints already; resume from them (--resume)" in refused
    more = ("--out", tmp_path / "b", *at_url, "--resume", "--max-steps", "16", *cluster)
    assert f"resuming from {ROOT}/step-000000010" in rowhaul("train", *data, *more)
    straight = ("--out", tmp_path / "d", *small, *cluster, "--max-steps", "16")
    rowhaul("train", *data, *straight)
    held_out = ("--data", log_folder / "test", "--json")
    assert rowhaul("evaluate", ROOT, *held_out) == rowhaul("evaluate", tmp_path / "d", *held_out)
    rowhaul("predict", ROOT, "--data", log_folder / "test", "--out", tmp_path / "scores.parquet")
    assert "all" in rowhaul("ckpt", "ls", ROOT, "--verify")
    assert "step 16" in rowhaul("ckpt", "ls", tmp_path / "b")  # whose checkpoints are at the URL
    rowhaul("ckpt", "merge", ROOT, "--out", "s3://models/merged")
    rowhaul("export", "s3://models/merged", "--out", tmp_path / "x")
    assert rowhaul("evaluate", tmp_path / "x", *held_out) == rowhaul("evaluate", ROOT, *held_out)
    said = rowhaul("train", *data, "--out", "s3://models/other", *small, code=2)
    assert "--checkpoints the URL" in said
