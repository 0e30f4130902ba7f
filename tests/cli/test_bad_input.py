"""What goes wrong is named, ends with an exit code, and leaves nothing half-written."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rowhaul as package

SMALL = ("--batch-size", "500", "--embedding-dim", "4", "--set", "model.options.top=[16]")


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
    if (tmp_path / "run").exists():
        code, _, err = rowhaul("train", "--data", tmp_path / "bad.parquet", "--out", tmp_path / "run", *SMALL)
        assert "holds a run without a checkpoint; remove the folder" in " ".join(err.split())


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
    assert "is a file, not a folder" in err.lower()


@pytest.mark.slow
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
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300
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
        (("train", "--data", log_folder, "--set", "epochs=[1"), "not YAML"),
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


def test_lists_are_not_kept_beside_scores_in_csv(rowhaul, trained, log_folder, tmp_path):
    given = ("--data", log_folder / "test", "--keep", "user,tags", "--out", tmp_path / "scores.csv")
    code, _, err = rowhaul("predict", trained, *given)
    said = " ".join(err.split())
    assert code == 2
    assert "column 'tags' is of type list" in said
    assert "write the scores to a .parquet file" in said
    assert not any(tmp_path.iterdir())


def test_what_is_no_run_is_named(rowhaul, log_folder, tmp_path):
    (tmp_path / "served.json").write_text("{}")
    code, _, err = rowhaul("evaluate", tmp_path, "--data", log_folder / "test")
    assert (code, "is a folder to serve from (export --dense)" in " ".join(err.split())) == (2, True)
    code, _, err = rowhaul("train", tmp_path, "--data", log_folder, "--out", tmp_path / "run")
    assert (code, "is a folder; a file of settings in YAML or TOML is needed" in " ".join(err.split())) == (
        2,
        True,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--k", "0"], "--k"),
        (["--users", "0"], "--users"),
        (["--data", "no.parquet"], "no such file: no.parquet"),
        (["--kind", "hsnw"], "unknown index 'hsnw'"),
        (["--out", "."], "exists; choose another"),
        (["--out", "no/items"], "there is no folder no"),
    ],
)
def test_what_an_index_cannot_be_made_of_is_told_before_the_run_is_read(options, message, rowhaul, tmp_path):
    code, _, err = rowhaul("index", tmp_path / "run", "--out", tmp_path / "items", *options)
    assert (code, message in err, "no training run" in err) == (2, True, False)


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
    assert "is inside the output folder" in err
    assert (tmp_path / "data" / "part-0.parquet").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--stores", "2"), "--stores is 2"),
        (("--workers", "0", "--stores", "1"), "--stores is 1"),
        (("--hot", "auto"), "--hot is 'auto'"),
        (("--colocated",), "--colocated is True"),
        (("--set", "cluster.cache_policy=lfu"), "--set cluster.cache_policy is 'lfu'"),
    ],
)
def test_cluster_settings_of_one_process_are_refused(options, named, rowhaul, log_folder, tmp_path):
    data = ("--data", log_folder / "part-0.parquet", "--out", tmp_path / "run")
    code, _, err = rowhaul("train", *data, *SMALL, *options)
    assert code == 2
    assert named in " ".join(err.split())
    assert "--workers N" in err
    assert not (tmp_path / "run").exists()


def test_cluster_settings_in_a_file_are_refused_unless_workers_are_switched_off(
    rowhaul, log_folder, tmp_path
):
    (tmp_path / "config.yaml").write_text("cluster: {stores: 2, workers: 0}\nmax_steps: 1\n")
    data = (tmp_path / "config.yaml", "--data", log_folder / "part-0.parquet", *SMALL)
    code, _, err = rowhaul("train", *data)
    assert code == 2
    assert "cluster.stores in" in " ".join(err.split())
    code, _, err = rowhaul("train", *data, "--workers", "0")
    assert code == 0, err


def test_a_key_given_twice_in_yaml_is_refused(rowhaul, log_folder, tmp_path):
    (tmp_path / "config.yaml").write_text("epochs: 1\nmodel:\n  name: dlrm\n  name: dcn\n")
    data = ("--data", log_folder / "part-0.parquet", *SMALL)
    code, _, err = rowhaul("train", tmp_path / "config.yaml", *data)
    assert code == 2
    assert "'name' is given twice, first on line 3" in " ".join(err.split())
    (tmp_path / "schema.yaml").write_text("label: click\nids: [user]\nids: [item]\n")
    code, _, err = rowhaul("train", *data, "--schema", tmp_path / "schema.yaml")
    assert code == 2
    assert "'ids' is given twice, first on line 2" in " ".join(err.split())
    code, _, err = rowhaul("train", *data, "--set", "tables={default: {ttl: 5, ttl: 6}}")
    assert code == 2
    assert "'ttl' is given twice" in " ".join(err.split())
