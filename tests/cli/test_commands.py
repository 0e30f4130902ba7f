"""The commands as a person types them: what they make, what they say, how they end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rowhaul as package
from rowhaul.cli import main


@pytest.fixture
def rowhaul(capsys, monkeypatch):
    """Run a command in this process; returns its exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rowhaul", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


SMALL = ("--batch-size", "500", "--embedding-dim", "4", "--set", "model.options.top=[16]")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, log_folder):
    """A finished run."""
    run = tmp_path_factory.mktemp("cli") / "run"
    command = [
        sys.executable,
        "-m",
        "rowhaul",
        "train",
        "--data",
        log_folder / "*.parquet",
        "--out",
        run,
        *SMALL,
        "--eval-data",
        log_folder / "test",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    for word in ("AUC", "log loss", "normalised entropy", "samples per second", "rowhaul predict"):
        assert word in done.stdout
    return run


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
    code, _, _ = rowhaul(
        "train", "--data", tmp_path / "plain.parquet", "--features", "user,item", "--label", "click", *SMALL
    )
    assert code == 0


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
    deadline = time.monotonic() + 60
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Stopped and saved. To go on: rowhaul train --resume" in out
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    command += ["--resume", "--max-steps", str(step + 5)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"in {step + 5:,} steps" in done.stdout


def write_bad(folder, **columns):
    """The click log with some columns replaced."""
    good = {
        "click": [0, 1],
        "price": [0.5, 1.0],
        "user": [1, 2],
        "item": ["a", "b"],
        "tags": [[1], [2]],
    }
    good.update(columns)
    table = pa.table({name: values for name, values in good.items() if values is not None})
    pq.write_table(table, folder / "bad.parquet")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"item": None}, "item"),
        ({"user": [1.5, 2.5]}, "user"),
        ({"price": ["a", "b"]}, "price"),
        ({"price": [0.5, float("nan")]}, "nan"),
        ({"click": [0, 2]}, "2"),
        ({"click": [0, None]}, "none; 0 or 1 is needed"),
        ({name: [] for name in ("click", "price", "user", "item", "tags")}, "no rows"),
    ],
    ids=["missing-column", "float-id", "text-dense", "nan", "label-2", "label-null", "empty"],
)
def test_bad_data_is_named_and_leaves_nothing(columns, message, rowhaul, log_schema, tmp_path):
    if columns.get("click") == []:
        types = [pa.int8(), pa.float32(), pa.int64(), pa.string(), pa.list_(pa.int64())]
        columns = {name: pa.array([], kind) for name, kind in zip(columns, types, strict=True)}
    write_bad(tmp_path, **columns)
    log_schema.write(tmp_path / "schema.yaml")
    code, _, err = rowhaul("train", "--data", tmp_path / "bad.parquet", "--out", tmp_path / "run", *SMALL)
    assert code == 2
    assert "bad.parquet" in err.replace("\n", "")
    assert message in err.lower()
    assert "Traceback" not in err
    if "row" not in err:  # found before the first step, so the corrected command can be run as it is
        assert not (tmp_path / "run").exists()
    else:
        assert not list(tmp_path.glob("run/checkpoints/*"))


@pytest.mark.parametrize("content", [b"", b"PAR1 nonsense", None], ids=["empty", "garbage", "truncated"])
def test_files_that_are_no_parquet(content, rowhaul, log_folder, log_schema, tmp_path):
    whole = (log_folder / "part-0.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2] if content is None else content)
    log_schema.write(tmp_path / "schema.yaml")
    code, _, err = rowhaul("train", "--data", tmp_path / "cut.parquet")
    assert code == 2
    assert "cut.parquet" in err.replace("\n", "")


def test_an_unfinished_data_folder_is_refused(rowhaul, log_folder, tmp_path):
    shutil.copytree(log_folder, tmp_path / "data")
    (tmp_path / "data" / "_progress.json").write_text("{}")
    for data in (tmp_path / "data", tmp_path / "data" / "test"):
        code, _, err = rowhaul("train", "--data", data)
        assert code == 2
        assert "unfinished" in err


def test_a_bad_line_is_named_or_skipped(rowhaul, tmp_path):
    fields = ["1", *["2"] * 13, *["00ff00ff"] * 26]
    lines = ["\t".join(fields), "\t".join(fields[:20]), "\t".join(fields)]
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    arguments = (
        "prepare",
        "--format",
        "criteo",
        tmp_path / "train.txt",
        "--out",
        tmp_path / "data",
        "--test-share",
        "0",
    )
    code, _, err = rowhaul(*arguments)
    assert code == 2
    assert "train.txt, line 2: 40 columns" in err.replace("\n", "")
    code, out, _ = rowhaul(*arguments, "--on-bad-line", "skip")
    assert code == 0
    assert "skipped 1 bad line:" in out
    assert pq.read_table(tmp_path / "data" / "part-00000.parquet").num_rows == 2


@pytest.fixture
def tiny_disk(tmp_path):
    """A real file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if made.returncode:
        pytest.skip(f"needs root to mount a small disk: {made.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_explained_and_leaves_no_checkpoint(rowhaul, tiny_disk, log_folder):
    code, _, err = rowhaul(
        "train",
        "--data",
        log_folder,
        "--out",
        tiny_disk / "run",
        "--batch-size",
        "500",
        "--embedding-dim",
        "512",
        "--model",
        "legacy",
    )
    assert code == 2
    assert "no space left" in err.lower()
    assert not list((tiny_disk / "run" / "checkpoints").glob("*"))


def test_a_full_disk_stops_generate_and_leaves_nothing(rowhaul, tiny_disk):
    code, _, err = rowhaul("generate", "--rows", "50_000", "--out", tiny_disk / "logs")
    assert code == 2
    assert "space" in err.lower()
    assert not (tiny_disk / "logs").exists()  # no whole part was written: nothing to mistake or to resume


def test_a_place_that_cannot_be_written(rowhaul, log_folder, tmp_path):
    (tmp_path / "file").write_text("x")
    code, _, err = rowhaul("train", "--data", log_folder, "--out", tmp_path / "file" / "run", *SMALL)
    assert code == 2
    assert "not a directory" in err.lower()


def test_an_unwritable_kernel_cache_only_warns(tmp_path):
    """A copy of the package that cannot write beside itself, for a user whose home is no folder."""
    shutil.copytree(
        Path(package.__file__).parent, tmp_path / "rowhaul", ignore=shutil.ignore_patterns("__pycache__")
    )
    for folder in [tmp_path / "rowhaul", *(tmp_path / "rowhaul").rglob("*/")]:
        (folder / "__pycache__").write_text("a file where the cache wants a folder")
    program = (
        "import numpy as np; from rowhaul.store.arena import RecordArena;"
        "arena = RecordArena(2, np.float32); records = arena.allocate(3);"
        "arena.write(records, np.ones((3, 2))); print(arena.read(records).sum())"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "HOME": "/dev/null",
        "XDG_CACHE_HOME": "/dev/null",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=100
    )
    assert done.stdout.strip() == "6.0", done.stderr
    assert "the kernel cache cannot be written" in done.stderr
    assert "Set NUMBA_CACHE_DIR to a folder you can write to" in done.stderr


def test_unknown_names_list_the_known(rowhaul, log_folder, tmp_path):
    (tmp_path / "c.yaml").write_text("model: dlrm\n")
    for arguments, known in (
        (("generate", "--preset", "criteoo", "--rows", "10", "--out", tmp_path / "x"), "criteo-search"),
        (("generate", "--rows", "many", "--out", tmp_path / "x"), "1_000_000"),
        (("prepare", "--format", "nope", log_folder, "--out", tmp_path / "x"), "movielens"),
        (("train", "--data", log_folder, "--model", "nope"), "wide_deep"),
        (("train", "--data", log_folder, "--set", "epochs"), "NAME=VALUE"),
        (("evaluate", tmp_path, "--data", log_folder), "no training run"),
        (("train", "--data", log_folder, "--set", "epochs=[1"), "no YAML"),
        (
            ("train", tmp_path / "c.yaml", "--data", log_folder, "--embedding-dim", 4),
            "expected settings by name",
        ),
        (("generate", "--raw", "--overwrite", "--out", tmp_path / "x"), "neither"),
    ):
        code, _, err = rowhaul(*arguments)
        assert code == 2
        assert known in err.replace("\n", "")
    assert not (tmp_path / "x").exists()


def test_test_files_taken_for_training_are_not_evaluated_on(rowhaul, tmp_path):
    rowhaul("generate", "--rows", "2_000", "--out", tmp_path / "logs")
    code, out, _ = rowhaul("train", "--data", f"{tmp_path}/logs/**/*.parquet", *SMALL)
    assert code == 0
    assert "held-out" not in out


def test_features_of_one_table_must_agree_on_the_type_of_ids(rowhaul, log_folder, tmp_path):
    (tmp_path / "s.yaml").write_text("label: click\nids: [{name: user, table: t}, {name: item, table: t}]\n")
    code, _, err = rowhaul("train", "--data", log_folder, "--schema", tmp_path / "s.yaml")
    assert code == 2
    assert "table 't' hold ids of different types" in err


def test_an_input_named_twice_is_refused(rowhaul, tmp_path):
    (tmp_path / "a.txt").write_text("x")
    code, _, err = rowhaul(
        "prepare", "--format", "criteo", tmp_path / "a.txt", tmp_path / "a.txt", "--out", tmp_path / "data"
    )
    assert code == 2
    assert "named twice" in err


def test_a_run_is_no_place_for_data(rowhaul, trained):
    before = (trained / "schema.yaml").read_text()
    code, _, err = rowhaul("generate", "--rows", "100", "--out", trained)
    assert code == 2
    assert "holds other files" in err
    assert (trained / "schema.yaml").read_text() == before


def test_data_is_not_prepared_over_its_input(rowhaul, log_folder, tmp_path):
    shutil.copytree(log_folder, tmp_path / "data")
    code, _, err = rowhaul("prepare", "--format", "parquet", tmp_path / "data" / "part-0.parquet",
                           "--schema", tmp_path / "data" / "schema.yaml", "--out", tmp_path / "data",
                           "--overwrite")  # fmt: skip
    assert code == 2
    assert "lies in the folder to write" in err
    assert (tmp_path / "data" / "part-0.parquet").exists()


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
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("logs/part-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "run the same command again to go on" in out
    assert "Traceback" not in err


def test_version(rowhaul):
    code, out, _ = rowhaul("--version")
    assert code == 0
    assert out.strip() == version("rowhaul")


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
