"""A run publishes a base and deltas; together they are the export of its last step, to the bit."""

import fcntl
import gc
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict

import pytest
from published_rows import SMALL, TABLES, Writer, exported, rows_of, weights_of

from rowhaul.cli.ckpt.convert import convert
from rowhaul.cli.ckpt.merge import merge_into_folder
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.publishing.folder_lock import FolderLock, check_free
from rowhaul.publishing.from_checkpoint import publish_checkpoint
from rowhaul.serve import Scorer
from rowhaul.train import TrainConfig, run_folder, train_run
from rowhaul.train.run_folder import PUBLISHED_BY, open_saved
from rowhaul.train.run_lock import LOCK_FILE, Holder


def config_of(tmp_path, **given):
    publish = {"to": str(tmp_path / "served"), "every": 2, "compact_after": 3, **given.pop("publish", {})}
    return TrainConfig.from_dict({"batch_size": 200, "model": SMALL, "publish": publish, **given})


@pytest.mark.parametrize(
    "settings",
    [
        {"tables": {"default": {"ttl": 3}}, "row_dtype": "int8"},
        pytest.param({"publish": {"dense": "onnx,pt2"}}, marks=pytest.mark.slow),
    ],
)
def test_base_and_deltas_are_the_export(tmp_path, log_folder, log_schema, settings):
    """Whole rows; and rows in few bits, of which some expire: deltas delete these."""
    train_run(config_of(tmp_path, **settings), log_schema, f"{log_folder}/*.parquet", out=tmp_path / "run")
    served = tmp_path / "served"
    about = json.loads((served / "served.json").read_text())["published"]
    scorer = Scorer(served)
    assert scorer.model.version == about["deltas"][-1]["to"] if about["deltas"] else about["version"]
    expected = exported(tmp_path / "run", tmp_path / "exported")
    assert scorer.step == expected.step > 0
    assert rows_of(scorer) == rows_of(expected)
    newest = served / about["deltas"][-1]["folder"] if about["deltas"] else scorer.folder.rows.path.parent
    exported_in = expected.folder.rows.path.parent
    assert weights_of(newest / "dense.onnx") == weights_of(exported_in / "dense.onnx")
    assert (newest / "dots.safetensors").read_bytes() == (exported_in / "dots.safetensors").read_bytes()
    assert scorer.dense.kind == "dots"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prune": {"ratio": "50%", "tail": "zeros"}}, "chunks and shared rows"),
        ({"publish": {"to": "s3://bucket/served"}}, "a folder of their machine"),
        ({"publish": {"to": "served", "every": "soon"}}, "publish.every"),
        ({"publish": {"to": "served", "dense": "tf"}}, "publish.dense"),
        ({"device": "cuda"}, "device cuda"),
    ],
)
def test_what_cannot_be_published_is_refused(tmp_path, log_folder, log_schema, settings, message):
    with pytest.raises(ConfigError, match=message):
        train_run(
            config_of(tmp_path, **settings), log_schema, f"{log_folder}/*.parquet", out=tmp_path / "run"
        )
    assert not (tmp_path / "served").exists()
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_run_is_refused_before_the_run_begins(
    tmp_path, log_folder, log_schema, served_run
):
    (tmp_path / "served").symlink_to(served_run[1])
    with pytest.raises(ConfigError, match="was exported; choose another folder"):
        train_run(config_of(tmp_path), log_schema, f"{log_folder}/*.parquet", out=tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.fixture(scope="module")
def begun(tmp_path_factory, log_folder, log_schema):
    """A run that has published four steps; copy it."""
    folder = tmp_path_factory.mktemp("begun")
    config = config_of(folder, max_steps=4)
    train_run(config, log_schema, f"{log_folder}/*.parquet", out=folder / "run")
    return folder


@pytest.fixture
def resume(tmp_path, begun, log_folder, log_schema):
    """Go on for two steps with a copy of that run, or with what was made of it."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)

    def train(out, **given):
        config = config_of(tmp_path, **{"max_steps": 6, **given})
        train_run(config, log_schema, f"{log_folder}/*.parquet", out=out, resume=True)

    return train


def test_a_run_that_was_converted_or_merged_is_another_one(tmp_path, resume):
    convert(str(tmp_path / "run"), row_dtype="int8", out=str(tmp_path / "run8"), as_json=False)
    merge_into_folder([open_saved(str(tmp_path / "run"))], tmp_path / "merged", lambda done, total: None)
    before = json.loads((tmp_path / "served" / "served.json").read_text())
    for made, settings in (("run8", {"row_dtype": "int8"}), ("merged", {})):
        assert PUBLISHED_BY not in open_saved(str(tmp_path / made)).facts
        with pytest.raises(ConfigError, match="published by another run"):
            resume(tmp_path / made, **settings)
    assert json.loads((tmp_path / "served" / "served.json").read_text()) == before
    elsewhere = {"to": str(tmp_path / "served8")}
    resume(tmp_path / "run8", row_dtype="int8", publish=elsewhere)
    expected = exported(tmp_path / "run8", tmp_path / "exported8")
    assert rows_of(Scorer(tmp_path / "served8")) == rows_of(expected)


@pytest.fixture
def converted(tmp_path, resume, monkeypatch):
    """The same run with rows of int8, as earlier versions made it: it takes the folder for its own."""
    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "PUBLISHED_BY", "another fact")
        convert(str(tmp_path / "run"), row_dtype="int8", out=str(tmp_path / "run8"), as_json=False)
    return tmp_path / "run8"


def test_rows_that_cannot_follow_a_base_begin_a_new_one(tmp_path, resume, converted):
    scorer = Scorer(tmp_path / "served")
    resume(converted, row_dtype="int8")
    assert scorer.refresh().new_base
    expected = exported(converted, tmp_path / "exported")
    assert (scorer.step, rows_of(scorer)) == (6, rows_of(expected))


def test_rows_of_a_cluster_that_cannot_follow_a_base_begin_a_new_one(
    tmp_path, converted, log_schema, served_run
):
    scorer, saved = Scorer(tmp_path / "served"), open_saved(str(converted))
    graph = next(served_run[1].glob("base-*/dense.onnx"))
    folder = Writer(tmp_path / "served", log_schema, graph, run=saved.facts[PUBLISHED_BY]).folder
    publish_checkpoint(saved, TABLES, folder)
    assert scorer.refresh().new_base
    assert rows_of(scorer) == rows_of(exported(converted, tmp_path / "exported"))


def test_other_graphs_than_those_of_the_base_begin_a_new_one(tmp_path, resume):
    """Deltas without the graph that servers run would be refused by all of them."""
    scorer = Scorer(tmp_path / "served", backend="onnx")
    resume(tmp_path / "run", publish={"dense": "onnx,pt2", "compact_after": 100})  # servers find theirs
    assert (scorer.refresh().new_base, scorer.step) == (False, 6)
    resume(tmp_path / "run", max_steps=8, publish={"dense": "pt2"})
    found = Scorer(tmp_path / "served", backend="pt2")
    assert (found.step, rows_of(found)) == (8, rows_of(exported(tmp_path / "run", tmp_path / "exported")))
    with pytest.raises(CheckpointError, match="no onnx graph, only pt2"):
        scorer.refresh()


def test_other_graphs_of_a_cluster_begin_a_new_base(tmp_path, resume, log_schema, served_run):
    saved = open_saved(str(tmp_path / "run"))
    graph = next(served_run[1].glob("base-*/dense.pt2"))
    run = saved.facts[PUBLISHED_BY]
    folder = Writer(tmp_path / "served", log_schema, graph, run=run, kind="pt2").folder
    publish_checkpoint(saved, TABLES, folder)
    assert Scorer(tmp_path / "served", backend="pt2").step == 4


@contextmanager
def held(folder):
    """Hold the lock of a folder as another process would, and say so."""
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(Holder("elsewhere", 7, 0.0, 0, "noon"))).encode(), 0)
    yield
    os.close(descriptor)


def test_two_processes_do_not_publish_to_one_folder(tmp_path, resume):
    """The copy of a run's folder has its name, too."""
    gc.collect()
    with (
        held(tmp_path / "served"),
        pytest.raises(ConfigError, match=r"process 7 .* on elsewhere, since noon publishes to .*--publish"),
    ):
        resume(tmp_path / "run")
    resume(tmp_path / "run")
    assert Scorer(tmp_path / "served").step == 6


def test_a_folder_is_locked_as_long_as_somebody_publishes(tmp_path):
    check_free(tmp_path / "none")
    one = FolderLock.of(tmp_path)
    assert FolderLock.of(tmp_path / ".." / tmp_path.name) is one
    check_free(tmp_path)
    with pytest.raises(BlockingIOError), (tmp_path / LOCK_FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    del one
    with held(tmp_path):
        for refused in (FolderLock.of, check_free):
            with pytest.raises(ConfigError, match="process 7"):
                refused(tmp_path)
    assert FolderLock.of(tmp_path) is not None


def test_where_nothing_can_be_locked_there_is_no_lock(tmp_path, monkeypatch):
    def unsupported(*arguments):
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert FolderLock.of(tmp_path) is None
    check_free(tmp_path)
