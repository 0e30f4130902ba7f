"""The commands as a person types them: what they make, what they say, how they end."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from rowhaul import __version__
from rowhaul.data.files import expand_files

SMALL = ("--batch-size", "500", "--embedding-dim", "4", "--set", "model.options.top=[16]")


def test_generate_train_evaluate_predict(rowhaul, tmp_path):
    code, out, _ = rowhaul("generate", "--preset", "criteo", "--rows", "6_000", "--out", tmp_path / "logs")
    assert code == 0
    assert "best possible AUC" in out
    data = f"{tmp_path}/logs/*.parquet"
    code, out, _ = rowhaul("train", "--data", data, "--out", tmp_path / "run", *SMALL)
    assert code == 0
    assert "on 600 held-out samples" in out  # test/ was found by itself
    test = f"{tmp_path}/logs/test/*.parquet"
    code, out, _ = rowhaul("evaluate", tmp_path / "run", "--data", test, "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1])["num_samples"] == 600
    _, held_out, _ = rowhaul("evaluate", tmp_path / "run", "--json")
    assert held_out.splitlines()[-1] == out.splitlines()[-1]
    code, out, _ = rowhaul("predict", tmp_path / "run", "--data", test, "--out", tmp_path / "scores.parquet")
    assert code == 0
    scores = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    assert len(scores) == 600
    assert ((scores > 0) & (scores < 1)).all()


def test_prepare_reads_what_generate_writes_raw(rowhaul, tmp_path):
    raw = tmp_path / "train.txt.gz"
    assert rowhaul("generate", "--rows", "500", "--raw", "--out", raw)[0] == 0
    code, out, _ = rowhaul("prepare", "--format", "criteo", raw, "--out", tmp_path / "data")
    assert code == 0
    assert "500 rows" in out
    rowhaul("generate", "--rows", "500", "--out", tmp_path / "logs", "--test-share", "0")
    rowhaul("prepare", "--format", "criteo", raw, "--out", tmp_path / "whole", "--test-share", "0")
    ids = [f"C{k}" for k in range(1, 27)]
    tables = [
        pq.read_table(tmp_path / name / "part-00000.parquet", columns=ids) for name in ("logs", "whole")
    ]
    assert tables[0].equals(tables[1])


def test_a_log_without_labels_is_prepared_to_be_scored(rowhaul, tmp_path):
    (tmp_path / "test.txt").write_text("".join("\t" * 38 + f"{row:08x}\n" for row in range(20)))
    code, out, _ = rowhaul("prepare", "--format", "criteo", tmp_path / "test.txt", "--out", tmp_path / "data")
    assert code == 0
    assert "20 rows" in out
    assert "0 of them in test/" in out
    assert "Next: rowhaul predict RUN" in out


def test_unseen_ids_do_not_stop_predict(rowhaul, trained, tmp_path):
    table = pa.table(
        {
            "price": np.zeros(3, np.float32),
            "user": [-1, 2**62, 5],
            "item": ["never", "seen", None],
            "tags": pa.array([[], [99, 98], None], pa.list_(pa.int64())),
        }
    )
    pq.write_table(table, tmp_path / "new.parquet")  # no label: it is what one wants to know
    code, _, _ = rowhaul(
        "predict", trained, "--data", tmp_path / "new.parquet", "--out", tmp_path / "s.parquet"
    )
    assert code == 0
    assert pq.read_table(tmp_path / "s.parquet").num_rows == 3
    code, _, err = rowhaul(
        "predict",
        trained,
        "--data",
        tmp_path / "new.parquet",
        "--out",
        tmp_path / "t.parquet",
        "--on-unknown",
        "error",
    )
    assert code == 2
    assert "was never trained" in err
    assert not list(tmp_path.glob("t.parquet*"))


def test_predict_keeps_what_exists(rowhaul, trained, log_folder, tmp_path):
    out = tmp_path / "scores.parquet"
    out.write_text("precious")
    arguments = ("predict", trained, "--data", log_folder / "test", "--out", out)
    code, _, err = rowhaul(*arguments)
    assert (code, out.read_text()) == (2, "precious")
    assert "exists" in err
    assert rowhaul(*arguments, "--overwrite")[0] == 0


def test_predict_keeps_columns_beside_the_scores(rowhaul, trained, log_folder, tmp_path):
    arguments = ("predict", trained, "--data", f"{log_folder}/*.parquet", "--batch-size", "901")
    assert rowhaul(*arguments, "--out", tmp_path / "plain.parquet")[0] == 0
    assert rowhaul(*arguments, "--out", tmp_path / "kept.parquet", "--keep", "item,user")[0] == 0
    kept = pq.read_table(tmp_path / "kept.parquet")
    assert kept.column_names == ["item", "user", "score"]
    assert kept["score"].equals(pq.read_table(tmp_path / "plain.parquet")["score"])
    data = pa.concat_tables(pq.read_table(log_folder / f"part-{part}.parquet") for part in range(2))
    assert kept.select(["item", "user"]).equals(data.select(["item", "user"]))
    code, _, err = rowhaul(*arguments, "--out", tmp_path / "x.parquet", "--keep", "itme")
    assert code == 2
    assert "did you mean 'item'?" in err
    assert not (tmp_path / "x.parquet").exists()


def test_kept_columns_of_other_types_in_another_file(rowhaul, trained, log_folder, tmp_path):
    """A wider type holds both; what no type holds is an error."""
    rows = pq.read_table(log_folder / "part-0.parquet").slice(0, 2)
    columns = {
        "narrow": pa.array([1, 2], pa.int32()), "wide": pa.array([2**40, None]), "text": pa.array(["a", "b"]),
    }  # fmt: skip
    for name, column in columns.items():
        pq.write_table(rows.append_column("note", column), tmp_path / f"{name}.parquet")

    def keep(*names):
        files = [part for name in names for part in ("--data", tmp_path / f"{name}.parquet")]
        return rowhaul(
            "predict", trained, *files, "--out", tmp_path / "s.parquet", "--keep", "note", "--overwrite"
        )

    assert keep("narrow", "wide")[0] == 0
    assert pq.read_table(tmp_path / "s.parquet")["note"].to_pylist() == [1, 2, 2**40, None]
    code, _, err = keep("narrow", "text")
    assert code == 2
    assert "'note' is string, not int32" in " ".join(err.split())


def test_scores_are_written_as_csv_too(rowhaul, trained, log_folder, tmp_path):
    arguments = ("predict", trained, "--data", log_folder / "test", "--keep", "item")
    assert rowhaul(*arguments, "--out", tmp_path / "s.csv")[0] == 0
    assert rowhaul(*arguments, "--out", tmp_path / "s.parquet")[0] == 0
    written, expected = csv.read_csv(tmp_path / "s.csv"), pq.read_table(tmp_path / "s.parquet")
    assert written["item"].to_pylist() == expected["item"].to_pylist()
    assert written["score"].cast(pa.float32()).equals(expected["score"])


def test_strings_as_views_are_kept_and_bytes_that_are_no_text_refused(rowhaul, trained, log_folder, tmp_path):
    rows = pq.read_table(log_folder / "part-0.parquet").slice(0, 2)
    columns = {
        "view": pa.array(["a", "é"], pa.string_view()), "plain": pa.array(["b", None]),
        "bytes": pa.array([b"c", b"\xff"], pa.binary_view()),
    }  # fmt: skip
    for name, column in columns.items():
        pq.write_table(rows.append_column("note", column), tmp_path / f"{name}.parquet")

    def keep(out, *names):
        files = [part for name in names for part in ("--data", tmp_path / f"{name}.parquet")]
        return rowhaul("predict", trained, *files, "--out", tmp_path / out, "--keep", "note", "--overwrite")

    assert keep("s.csv", "view", "plain")[0] == 0
    notes = csv.read_csv(tmp_path / "s.csv")["note"].to_pylist()
    assert notes == ["a", "é", "b", ""]
    assert keep("s.parquet", "bytes")[0] == 0
    assert pq.read_table(tmp_path / "s.parquet")["note"].to_pylist() == [b"c", b"\xff"]
    code, _, err = keep("t.csv", "bytes")
    said = " ".join(err.split())
    assert (code, "column 'note' is of type large_binary and has values that a CSV file" in said) == (2, True)
    assert not (tmp_path / "t.csv").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("s.txt", "written to .parquet or .csv files"),
        ("nowhere/s.csv", "there is no folder"),
        ("file/s.csv", "file is a file, not a folder"),
        ("folder.csv", "is a folder; name a file"),
    ],
)
def test_a_place_where_scores_cannot_be_written_is_named(
    name, message, rowhaul, trained, log_folder, tmp_path
):
    (tmp_path / "file").touch()
    (tmp_path / "folder.csv").mkdir()
    code, _, err = rowhaul("predict", trained, "--data", log_folder / "test", "--out", tmp_path / name)
    assert code == 2
    assert message in " ".join(err.split())


def test_flags_override_the_file(rowhaul, log_folder, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "batch_size: 100\nepochs: 3\nmodel: {name: deepfm, embedding_dim: 2}\n"
    )
    code, _, _ = rowhaul(
        "train",
        tmp_path / "config.yaml",
        "--data",
        log_folder,
        "--out",
        tmp_path / "run",
        "--batch-size",
        1000,
        "--max-steps",
        2,
        "--set",
        "rates.decay=linear",
    )
    assert code == 0
    written = (tmp_path / "run" / "config.yaml").read_text()
    for line in ("batch_size: 1000", "epochs: 3", "name: deepfm", "decay: linear"):
        assert line in written


def test_data_without_a_schema(rowhaul, log_folder, tmp_path):
    shutil.copy(log_folder / "part-0.parquet", tmp_path / "plain.parquet")
    code, _, err = rowhaul("train", "--data", tmp_path / "plain.parquet")
    assert code == 2
    assert "no schema.yaml" in err
    train = ("train", "--data", tmp_path / "plain.parquet", "--label", "click", *SMALL, "--features")
    for names in ("user,item", "user, item"):
        code, _, err = rowhaul(*train, names)
        assert code == 0, err
    for names in ("user,", "", "user,,item"):
        code, _, err = rowhaul(*train, names)
        assert (code, f"--features {names!r} has an empty name" in " ".join(err.split())) == (2, True)


@pytest.mark.slow
@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_and_saves_and_resume_goes_on(number, log_folder, tmp_path):
    command = [
        sys.executable,
        "-m",
        "rowhaul",
        "train",
        "--data",
        str(log_folder),
        "--out",
        str(tmp_path / "run"),
        "--batch-size",
        "20",
        "--epochs",
        "200",
        "--set",
        "log_every=1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    # Until the first step is over a signal interrupts: there is nothing to save.
    while not (log.exists() and log.read_bytes().count(b"\n") > 1) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "Stopped and saved. To continue: rowhaul train --resume" in out
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    command += ["--resume", "--max-steps", str(step + 5)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"in {step + 5:,} steps" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("place", ["a closed pipe", "a full disk"])
def test_output_that_cannot_be_written_does_not_end_a_run(place, log_folder, tmp_path):
    command = [sys.executable, "-m", "rowhaul", "train", "--data", log_folder, "--out", tmp_path / "run"]
    command += ["--eval-data", log_folder / "test", "--eval-every", "2", *SMALL]
    if place == "a full disk":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, output = os.pipe()
        os.close(reading)
    done = subprocess.run(
        list(map(str, command)), stdout=output, stderr=subprocess.PIPE, text=True, timeout=200
    )
    os.close(output)
    assert done.stderr.count("training goes on without it") == 1, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [2, 4, 6, 8, 10, 12]
    assert (tmp_path / "run" / "checkpoints" / "step-000000012" / "manifest.json").is_file()


def test_test_files_taken_for_training_are_not_evaluated_on(rowhaul, tmp_path):
    rowhaul("generate", "--rows", "2_000", "--out", tmp_path / "logs")
    everything, run = f"{tmp_path}/logs/**/*.parquet", tmp_path / "run"
    code, out, _ = rowhaul("train", "--data", everything, "--out", run, *SMALL)
    assert code == 0
    assert "for want of held-out samples" in out
    code, _, err = rowhaul("evaluate", run)
    assert code == 2
    assert "does not say which samples were held out: name some with --data" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.usefixtures("default_sigint")
def test_an_interrupted_generate_says_how_to_go_on(tmp_path):
    command = [
        sys.executable,
        "-m",
        "rowhaul",
        "generate",
        "--rows",
        "50_000_000",
        "--out",
        str(tmp_path / "logs"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("logs/part-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "run the same command again to continue" in out
    assert "Traceback" not in err


def test_advice_about_folders_with_a_space_can_be_typed(rowhaul, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = rowhaul("generate", "--rows", "300", "--out", "my log")
    assert code == 0, err
    after_next = shlex.split(out.partition("Next: rowhaul ")[2])
    assert expand_files(after_next[after_next.index("--data") + 1])
    code, out, err = rowhaul("ckpt", "merge", trained, "--out", "my run")
    assert code == 0, err
    assert shlex.split(out.partition("Next: rowhaul ")[2])[:2] == ["evaluate", "my run"]
    code, out, err = rowhaul("train", "--resume", "--out", "my run")
    assert code == 0, err
    predict = next(line for line in out.splitlines() if line.startswith("  rowhaul predict"))
    code, out, err = rowhaul(*shlex.split(predict)[1:])
    assert (code, Path("scores.parquet").is_file()) == (0, True), err


def test_a_run_resumes_with_the_schema_of_its_checkpoint(rowhaul, log_folder, tmp_path):
    """Neither a folder of the run nor a schema beside the data is needed."""
    data = tmp_path / "data" / "clicks.parquet"
    data.parent.mkdir()
    shutil.copy(log_folder / "part-0.parquet", data)
    given = ("train", "--data", data, "--checkpoints", tmp_path / "saved")
    begun = (*given, "--features", "user,item", "--label", "click", *SMALL)
    code, _, err = rowhaul(*begun, "--max-steps", "1")
    assert code == 0, err
    for more in (("--max-steps", "2"), ("--max-steps", "3", "--out", tmp_path / "run")):
        code, out, err = rowhaul(*given, "--resume", *more)
        assert (code, f"in {more[1]} steps" in out) == (0, True), err
    code, _, err = rowhaul(*given, "--resume", "--label", "bought")
    assert (code, "but the schema of the checkpoint is one" in " ".join(err.split())) == (2, True)


def test_version(rowhaul):
    code, out, _ = rowhaul("--version")
    assert code == 0
    assert out.strip() == __version__


def test_demo_ends_with_what_to_try_next(rowhaul, tmp_path):
    code, out, _ = rowhaul("demo", "--rows", "5000", "--out", tmp_path / "demo")
    assert code == 0
    for word in ("AUC", "best possible", "samples per second", "What to try next"):
        assert word in out
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("x")
    code, _, _ = rowhaul("demo", "--rows", "5000", "--out", tmp_path / "mine")
    assert code == 2
    assert (tmp_path / "mine" / "precious.txt").exists()
