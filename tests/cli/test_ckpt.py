"""`rowhaul ckpt` and `rowhaul export` on what `rowhaul train` has saved."""

import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from rowhaul.checkpoint import CheckpointWriter
from rowhaul.data.keys import hash_string
from rowhaul.data.stream import SampleStream
from rowhaul.nn import Batch
from rowhaul.train import load_trained

USER = 7919  # an id that every log has


@pytest.fixture(scope="module")
def loaded(trained):
    return load_trained(trained)


def rows_of(trainer, table):
    return {
        int(key): row
        for keys, records in trainer.collection.rows(table)
        for key, row in zip(keys, records, strict=True)
    }


def test_ls_counts_what_was_trained(rowhaul, trained, loaded):
    code, out, _ = rowhaul("ckpt", "ls", trained, "--verify")
    assert code == 0
    for words in (
        "step 12",
        "6,000 samples",
        "model dlrm",
        "rows by rowwise_adagrad",
        "verified: all 6 files",
    ):
        assert words in out
    code, out, _ = rowhaul("ckpt", "ls", trained, "--json")
    found = json.loads(out)
    assert {one["name"]: one["rows"] for one in found["tables"]} == {
        name: loaded.collection.num_rows(name) for name in ("user", "item", "tags")
    }
    assert (found["verified"], found["damaged"], found["layout"]) == (False, {}, {})


def test_ls_verify_names_the_damaged_file(rowhaul, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    (path,) = (tmp_path / "run" / "checkpoints").glob("*/rows-0001-00000.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert rowhaul("ckpt", "ls", tmp_path / "run")[0] == 0  # nothing was read
    code, out, _ = rowhaul("ckpt", "ls", tmp_path / "run", "--verify")
    assert code == 2
    assert "1 file of 6 damaged" in out
    assert f"{path} is damaged" in out
    code, out, err = rowhaul("export", tmp_path / "run", "--out", tmp_path / "x")
    assert code == 2
    assert path.name in err
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_cat_shows_rows_of_integer_and_text_ids(rowhaul, trained, loaded):
    code, out, _ = rowhaul("ckpt", "cat", trained, str(USER), "item-5", "--state", "--json")
    assert code == 0
    user, item = json.loads(out)["rows"]
    for row, key in ((user, USER), (item, hash_string("item-5"))):
        record = rows_of(loaded, row["table"])[key]
        assert row["key"] == key
        assert np.array(row["values"] + row["state"], np.float32).tobytes() == record.tobytes()
    assert (user["table"], user["ids"], item["table"], item["ids"]) == ("user", "integer", "item", "text")
    code, out, _ = rowhaul("ckpt", "cat", trained, "item-5")
    assert code == 0
    assert "the text 'item-5'" in out
    assert "state" not in out


def test_cat_says_where_an_absent_key_was_looked_for(rowhaul, trained):
    code, out, _ = rowhaul("ckpt", "cat", trained, "-5", str(USER), "item-5")
    assert code == 1
    assert "'-5' is in none of the tables searched: user, item, tags" in out
    assert f"user: key {USER}" in out  # the others are shown
    code, out, _ = rowhaul("ckpt", "cat", trained, "-5", "--json")
    assert (code, json.loads(out)["absent"]) == (1, ["-5"])
    code, out, _ = rowhaul("ckpt", "cat", trained, str(USER), "--table", "item")
    assert code == 1
    assert "searched: item (without --table also: user, tags)" in out


def test_cat_takes_stored_keys_of_text_ids_when_told_so(rowhaul, trained):
    stored = str(hash_string("item-5"))
    code, out, _ = rowhaul("ckpt", "cat", trained, stored)
    assert code == 1
    assert "add --raw to see it" in out
    assert rowhaul("ckpt", "cat", trained, stored, "--raw")[0] == 0
    code, _, err = rowhaul("ckpt", "cat", trained, "item-5", "--raw")
    assert code == 2
    assert "--raw takes 64-bit integers" in err


def test_bad_arguments_of_cat_are_named(rowhaul, trained):
    code, _, err = rowhaul("ckpt", "cat", trained, "1", "--table", "users")
    assert code == 2
    assert "no table 'users'; its tables are user, item, tags" in err
    code, _, err = rowhaul("ckpt", "cat", trained, "1", "--stat")
    assert code == 2
    assert "no such option: --stat" in err


def test_an_exported_model_serves_what_predict_predicts(rowhaul, trained, loaded, log_folder, tmp_path):
    """Rows and weights from the exported files alone, and from the model only its arithmetic."""
    code, out, _ = rowhaul("export", trained, "--out", tmp_path / "x")
    assert code == 0
    assert "read back and equal" in out
    manifest = json.loads((tmp_path / "x" / "export.json").read_text())
    served = load_trained(trained)
    served.collection.clear()
    for table in manifest["tables"]:
        rows = pq.read_table(tmp_path / "x" / table["file"])
        values = rows["values"].combine_chunks().flatten().to_numpy().reshape(len(rows), -1)
        records = np.concatenate([values, np.zeros((len(rows), 1), np.float32)], axis=1)
        served.collection.load_rows(table["name"], rows["key"].to_numpy(), records)
    dense = safetensors.torch.load_file(tmp_path / "x" / "dense.safetensors")
    with torch.no_grad():
        for name, weight in [*served.model.named_parameters(), *served.model.named_buffers()]:
            weight.copy_(dense.pop(name))
    assert not dense
    stream = SampleStream(log_folder / "test", loaded.schema, 500)
    loaded.model.eval()
    served.model.eval()
    for samples in stream:
        batch = Batch.from_samples(samples)
        assert torch.equal(served.model(batch), loaded.model(batch))


def test_merge_makes_a_run_that_evaluates_and_goes_on(rowhaul, trained, log_folder, tmp_path):
    code, out, _ = rowhaul("ckpt", "merge", trained, "--out", tmp_path / "again")
    assert code == 0
    assert "Merged into" in out
    test = log_folder / "test"
    scores = [
        json.loads(rowhaul("evaluate", run, "--data", test, "--json")[1].splitlines()[-1])
        for run in (trained, tmp_path / "again")
    ]
    assert scores[0] == scores[1]
    data = f"{log_folder}/*.parquet"
    code, out, _ = rowhaul("train", "--resume", "--out", tmp_path / "again", "--data", data, "--epochs", "2")
    assert code == 0
    assert "in 24 steps" in out
    code, _, err = rowhaul("ckpt", "merge", trained, "--out", tmp_path / "again")
    assert code == 2
    assert "exists and is not empty" in err


def test_merge_says_whose_rows_were_taken(rowhaul, trained, tmp_path):
    with CheckpointWriter(tmp_path / "more") as writer:
        rows = np.ones((2, 5), np.float32)
        writer.table("user", [(np.array([USER, -9]), rows)], dim=4, state_width=1, dtype="float32")
        writer.table("city", [(np.array([1]), rows[:1])], dim=4, state_width=1, dtype="float32")
    code, out, _ = rowhaul("ckpt", "merge", trained, tmp_path / "more", "--out", tmp_path / "to")
    assert code == 0
    assert "were taken from the last one" in out
    code, out, _ = rowhaul("ckpt", "cat", tmp_path / "to", str(USER), "-9", "--json")
    assert code == 0
    assert [row["values"] for row in json.loads(out)["rows"]] == [[1.0] * 4] * 2
    code, out, _ = rowhaul("ckpt", "ls", tmp_path / "to", "--json")
    assert [one["name"] for one in json.loads(out)["tables"]] == ["user", "item", "tags", "city"]


@pytest.mark.slow
@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_during_an_export_leaves_nothing(tmp_path):
    num_rows = 4_000_000
    with CheckpointWriter(tmp_path / "c") as writer:
        rows = np.zeros((num_rows, 16), np.float32)
        writer.table("t", [(np.arange(num_rows), rows)], dim=16, state_width=0, dtype="float32")
    command = [sys.executable, "-m", "rowhaul", "export", tmp_path / "c", "--out", tmp_path / "x"]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        began = time.monotonic()
        while not list(tmp_path.glob(".tmp-x/tables/*")) and time.monotonic() < began + 60:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 130, (out, err)
    assert b"nothing was written" in out
    assert [one.name for one in tmp_path.iterdir()] == ["c"]


def test_parquet_of_an_export_is_a_plain_table(rowhaul, trained, tmp_path):
    assert rowhaul("ckpt", "export", trained, "--out", tmp_path / "x", "--table", "user", "--state")[0] == 0
    (path,) = (tmp_path / "x" / "tables").iterdir()
    assert pq.read_schema(path).remove_metadata() == pa.schema(
        [
            pa.field("key", pa.int64(), nullable=False),
            pa.field("values", pa.list_(pa.float32(), 4), nullable=False),
            pa.field("state", pa.list_(pa.float32(), 1), nullable=False),
        ]
    )


def test_a_pruned_run_is_listed_shown_merged_and_exported(rowhaul, log_folder, tmp_path):
    run, test = tmp_path / "run", log_folder / "test"
    code, _, err = rowhaul(
        "train", "--data", f"{log_folder}/*.parquet", "--out", run, "--prune", "70%", "--batch-size", 500,
        "--embedding-dim", 8, "--set", "prune.chunks=4", "--set", "prune.period=3", "--set", "max_steps=8",
    )  # fmt: skip
    assert code == 0, err
    code, out, _ = rowhaul("ckpt", "ls", run)
    assert code == 0
    assert "pruned, 4 chunks a row" in out
    assert "stored chunks" in out
    code, out, _ = rowhaul("ckpt", "ls", run, "--json")
    tables = json.loads(out)["tables"]
    assert 0 < sum(one["chunks_there"] for one in tables) < 4 * sum(one["rows"] for one in tables)
    code, out, _ = rowhaul("ckpt", "cat", run, str(USER), "--table", "user")
    assert code == 0
    assert " of 4 stored" in out
    code, out, _ = rowhaul("ckpt", "merge", run, run, "--out", tmp_path / "merged")
    assert code == 0
    code, _, err = rowhaul("export", tmp_path / "merged", "--out", tmp_path / "exported", "--format", "npz")
    assert code == 0, err
    scores = []
    for folder in (run, tmp_path / "merged", tmp_path / "exported"):
        code, out, err = rowhaul("evaluate", folder, "--data", test, "--json")
        assert code == 0, err
        scores.append(json.loads(out))
    assert scores[0] == scores[1] == scores[2]
    code, _, err = rowhaul("evaluate", tmp_path / "exported" / "tables", "--data", test)
    assert code == 2
    assert "is no training run" in err


def test_unsigned_ids_are_found_by_their_own_number():
    from rowhaul.cli.ckpt.keys import readings

    assert readings(str(2**63 + 5))[0].key == -(2**63) + 5
    assert readings(str(2**64 - 1))[0].key == -1
    assert readings("-1")[0].key == -1
    assert [reading.kind for reading in readings(str(2**64))] == ["text"]
