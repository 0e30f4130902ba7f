"""The same rows as CSV and as Parquet are the same to a model, or are refused."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from rowhaul.data.keys import hash_string

SMALL = ("--batch-size", "500", "--embedding-dim", "4", "--set", "model.options.top=[16]")
INTEGERS = "label: click\nids: [user, item]\n"
TEXTS = "label: click\nids: [{name: user, type: string}, {name: item, type: string}]\n"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A log of integer ids as CSV and as Parquet."""
    folder = tmp_path_factory.mktemp("rows")
    random = np.random.default_rng(0)
    user, item = random.integers(0, 200, 4000), random.integers(0, 50, 4000)
    table = pa.table({"click": ((user + item) % 3 == 0).astype(np.int8), "user": user, "item": item})
    pyarrow.csv.write_csv(table, folder / "log.csv")
    pq.write_table(table, folder / "log.parquet")
    (folder / "schema.yaml").write_text(INTEGERS)
    (folder / "texts.yaml").write_text(TEXTS)
    return folder


def trained_from_csv(rowhaul, rows, tmp_path, schema):
    csv, data = rows / "log.csv", tmp_path / "data"
    schema = rows / schema
    code, out, err = rowhaul("prepare", "--format", "csv", csv, "--schema", schema, "--out", data)
    assert code == 0, err
    code, _, err = rowhaul("train", "--data", data, "--out", tmp_path / "run", *SMALL)
    assert code == 0, err
    return " ".join(out.split())


def auc(rowhaul, run, data):
    code, out, err = rowhaul("evaluate", run, "--data", data, "--json")
    assert code == 0, err
    return json.loads(out)["auc"]


def test_a_model_of_a_csv_knows_the_same_rows_as_parquet(rowhaul, rows, tmp_path):
    said = trained_from_csv(rowhaul, rows, tmp_path, "schema.yaml")
    assert "ids taken for integers: user, item" in said
    held_out = tmp_path / "held-out.parquet"
    first = pq.read_table(tmp_path / "data" / "test")
    pq.write_table(pq.read_table(rows / "log.parquet").slice(4000 - first.num_rows), held_out)
    assert auc(rowhaul, tmp_path / "run", held_out) == auc(rowhaul, tmp_path / "run", tmp_path / "data/test")


def test_ids_of_another_kind_are_refused_wherever_they_come(rowhaul, rows, tmp_path):
    trained_from_csv(rowhaul, rows, tmp_path, "texts.yaml")
    run, data = tmp_path / "run", ("--data", rows / "log.parquet")
    export = tmp_path / "exported"
    assert rowhaul("export", run, "--out", export)[0] == 0
    for command in (
        ("evaluate", run, *data),
        ("evaluate", export, *data),
        ("predict", run, *data, "--out", tmp_path / "scores.parquet"),
        ("train", "--resume", "--out", run, *data, *SMALL),
    ):
        code, _, err = rowhaul(*command)
        assert code == 2
        err = " ".join(err.split())
        assert "id column 'user' holds integer ids, but the model was trained on text ids" in err, command
        assert "`type: string`" in err
    other = tmp_path / "other"
    code, _, err = rowhaul("train", *data, "--out", other, *SMALL)
    assert code == 0, err
    code, _, err = rowhaul("ckpt", "merge", run, other, "--out", tmp_path / "merged")
    assert code == 2
    assert "feature 'user' has integer ids, but text ids" in " ".join(err.split())


def test_ids_are_found_in_a_checkpoint_as_they_were_in_the_csv(rowhaul, rows, tmp_path):
    trained_from_csv(rowhaul, rows, tmp_path, "texts.yaml")
    code, out, _ = rowhaul("ckpt", "cat", tmp_path / "run", "7", "--table", "user")
    assert code == 0
    assert f"the text '7' (key {hash_string('7')})" in " ".join(out.split())


def test_an_id_that_is_not_utf8_is_not_found_and_says_so(rowhaul, trained):
    code, out, err = rowhaul("ckpt", "cat", trained, b"caf\xe9".decode(errors="surrogateescape"))
    assert code == 1
    assert "is in none of the tables searched" in " ".join(out.split())
    assert "Traceback" not in err


def old_version(run):
    """Make the facts of a run's checkpoints those of an earlier version."""
    for path in run.glob("checkpoints/*/manifest.json"):
        manifest = json.loads(path.read_text())
        facts = manifest["facts"]
        del facts["key_origins"], manifest["xxh3"]
        facts["key_kinds"] = dict.fromkeys(facts["key_kinds"], "integer")  # keys, of whatever
        path.write_text(json.dumps(manifest))


def test_a_run_of_an_earlier_version_takes_the_data_it_took(rowhaul, rows, tmp_path):
    trained_from_csv(rowhaul, rows, tmp_path, "texts.yaml")
    run, data = tmp_path / "run", tmp_path / "data" / "test"
    before = auc(rowhaul, run, data)
    old_version(run)
    assert auc(rowhaul, run, data) == before
    assert auc(rowhaul, run, rows / "log.parquet") != before  # was not refused either


def test_a_jump_of_ids_never_trained_is_warned_of(rowhaul, rows, tmp_path):
    """As if nothing had been recorded: integers where the model knows hashes of their text."""
    trained_from_csv(rowhaul, rows, tmp_path, "texts.yaml")
    run, data = tmp_path / "run", ("--data", tmp_path / "data" / "test")
    code, out, err = rowhaul("evaluate", run, *data)
    assert code == 0
    assert "never trained" in out
    assert "warning" not in out + err
    old_version(run)
    code, out, err = rowhaul("evaluate", run, "--data", rows / "log.parquet")
    assert code == 0
    assert "100.0% of the ids read" in out
    assert "100.0% of the ids of 'user' (0.0% when the run was evaluated)" in " ".join(err.split())
    scores = ("--out", tmp_path / "scores.parquet")
    code, out, err = rowhaul("predict", run, "--data", rows / "log.parquet", *scores)
    assert code == 0
    assert "never trained: 100.0% of the ids read" in out
    assert "warning: never trained: 100.0%" in err


def test_a_resumed_run_remembers_its_data(rowhaul, log_folder, tmp_path):
    run, held_out = tmp_path / "run", tmp_path / "held-out.parquet"
    table = pq.read_table(log_folder / "test" / "part-0.parquet")
    pq.write_table(table, held_out)
    options = ("--max-steps", "2", "--schema", log_folder / "schema.yaml", *SMALL)
    data = ("--data", log_folder / "part-0.parquet", "--eval-data", held_out)
    code, _, err = rowhaul("train", *data, "--out", run, *options)
    assert code == 0, err
    code, out, err = rowhaul("train", "--resume", "--out", run, "--max-steps", "4")
    assert code == 0, err
    assert "on 2,000 held-out samples" in out
    pq.write_table(table.slice(500), held_out)
    other = tmp_path / "other.parquet"
    pq.write_table(table.slice(1000), other)
    code, out, _ = rowhaul("train", "--resume", "--out", run, "--max-steps", "5", "--eval-data", other)
    assert code == 0
    assert "on 1,000 held-out samples" in out
    (run / "data.yaml").unlink()
    code, _, err = rowhaul("train", "--resume", "--out", run)
    assert code == 2
    assert "does not say what it was trained on: name the Parquet files" in " ".join(err.split())
    code, _, err = rowhaul("train", "--out", tmp_path / "new")
    assert code == 2
    assert "name the Parquet files (--data" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.parametrize("data_from", ["every_host", "rank0"])
def test_a_cluster_remembers_its_data_and_counts_ids_never_trained(data_from, log_folder, tmp_path):
    run = tmp_path / "run"
    parts = [log_folder / "part-0.parquet", log_folder / "part-1.parquet"]
    first = ("--data", parts[0], "--eval-data", log_folder / "test")
    cluster = ("--workers", "2", "--stores", "1", "--data-from", data_from)
    train(*first, "--out", run, *cluster, *SMALL, "--max-steps", "2")
    resumed = train("--resume", "--out", run, "--max-steps", "0")
    assert "on 2,000 held-out samples" in resumed
    contents = json.loads((run / "contents.json").read_text())
    assert len(contents[0]["column_digests"]) >= 4
    extended = train("--resume", "--out", run, "--data", parts[0], "--data", parts[1])
    assert "1 data files were added at the end" in extended
    train(*first, "--out", tmp_path / "alone", *SMALL, "--max-steps", "2")
    alone, several = evaluations(tmp_path / "alone"), evaluations(run)
    assert [one["step"] for one in several] == [2, 6, 12]
    assert several[0]["unknown_by_feature"] == alone[0]["unknown_by_feature"]
    assert several[0]["unknown_keys"] == alone[0]["unknown_keys"] > 0
    pq.write_table(pq.read_table(parts[0]).slice(1), tmp_path / "part-0.parquet")
    command = (*COMMAND, "--resume", "--out", run, "--data", tmp_path / "part-0.parquet", "--data", parts[1])
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "part-0.parquet has changed" in " ".join(done.stderr.split()) + " ".join(done.stdout.split())


COMMAND = (sys.executable, "-m", "rowhaul", "train")


def train(*arguments):
    done = subprocess.run(list(map(str, (*COMMAND, *arguments))), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def evaluations(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "eval"]
