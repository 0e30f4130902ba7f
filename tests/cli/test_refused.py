"""What would lose data or mislead is refused, and the message says what to do instead."""

import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rowhaul.cli.demo import _begin_folder
from rowhaul.data.schema import Schema
from rowhaul.errors import ConfigError

SMALL = ("--batch-size", "500", "--embedding-dim", "4", "--set", "model.options.top=[16]")
SAMPLE = '{"click": 1, "price": 0.5, "user": 1, "item": "a", "tags": [1]}\n'


def on_one_line(text):
    return " ".join(text.split())


def train(*arguments, piped=""):
    command = [sys.executable, "-m", "rowhaul", "train", *arguments, *SMALL]
    return subprocess.run(command, input=piped, text=True, capture_output=True, timeout=300)


def test_an_empty_pipe_is_an_error_and_saves_nothing(log_folder, tmp_path):
    pipe = ("--data", "-", "--schema", log_folder / "schema.yaml", "--out", tmp_path / "run")
    ended = train(*pipe)
    assert ended.returncode == 2
    assert "standard input has ended without one sample; nothing was trained" in on_one_line(ended.stderr)
    assert not (tmp_path / "run" / "checkpoints").exists()
    lines = train(*pipe, "--resume", "--set", "max_steps=1", piped=SAMPLE * 500)
    assert lines.returncode == 0, lines.stderr


def test_a_stream_that_stays_idle_does_not_say_that_it_was_finished(rowhaul, log_folder, tmp_path):
    (tmp_path / "in").mkdir()
    follow = ("--data", tmp_path / "in", "--follow", "--schema", log_folder / "schema.yaml")
    idle = ("--stop-when-idle", "0.2s")
    code, out, err = rowhaul("train", *follow, *idle, "--out", tmp_path / "run", *SMALL)
    assert (code, "no sample arrived: nothing was trained" in out, "finished" in out) == (0, True, False), err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--set", "max_steps=3"), "the run was finished after 3 steps"),
        (("--eval-every", "2", "--set", "patience=1", "--row-lr", "50"), "the run had ended early after"),
    ],
)
def test_a_stream_that_has_ended_is_not_said_to_be_idle(more, said, rowhaul, log_folder, tmp_path):
    follow = ("--data", log_folder, "--follow", "--stop-when-idle", "0.2s")
    follow += ("--eval-data", log_folder / "test")
    for again in ((), ("--resume",)):
        code, out, err = rowhaul("train", *follow, "--out", tmp_path / "run", *SMALL, *more, *again)
        assert code == 0, err
        assert (said in on_one_line(out)) == bool(again)
        assert "no sample arrived" not in out


@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_scores_do_not_replace_the_data(more, rowhaul, trained, log_folder, tmp_path):
    data = tmp_path / "data.parquet"
    data.write_bytes((log_folder / "part-0.parquet").read_bytes())
    (tmp_path / "link.parquet").symlink_to(data)
    for out in (data, tmp_path / "link.parquet"):
        code, _, err = rowhaul("predict", trained, "--data", data, "--out", out, *more)
        assert (code, "is one of the data files" in on_one_line(err)) == (2, True)
        assert "--overwrite" not in err
    assert "score" not in pq.read_schema(data).names


def test_a_column_is_kept_once(rowhaul, trained, log_folder, tmp_path):
    arguments = ("--data", log_folder / "test", "--out", tmp_path / "s.parquet", "--keep", "user,item,user")
    code, _, err = rowhaul("predict", trained, *arguments)
    assert (code, "--keep names user more than once" in on_one_line(err)) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_serving_says_how_to_export_a_run(rowhaul, trained, tmp_path):
    code, _, err = rowhaul("serve", trained)
    assert (code, f"`rowhaul export {trained} --out served --dense onnx`" in on_one_line(err)) == (2, True)
    code, _, err = rowhaul("serve", tmp_path / "new")
    assert f"`rowhaul export RUN --out {tmp_path / 'new'} --dense onnx`" in on_one_line(err)
    (tmp_path / "other.txt").touch()
    code, _, err = rowhaul("serve", tmp_path)
    assert "`rowhaul export RUN --out served --dense onnx`" in on_one_line(err)


@pytest.mark.parametrize(
    "cluster", [(), pytest.param(("--workers", "2", "--colocated"), marks=pytest.mark.slow)], ids=len
)
def test_metrics_within_groups_need_a_group(cluster, log_folder, tmp_path):
    assert not Schema.read(log_folder / "schema.yaml").group
    ended = train("--data", log_folder, "--out", tmp_path / "run", "--set", "metrics=[gauc]", *cluster)
    assert ended.returncode != 0
    said = on_one_line(ended.stderr)
    assert "metrics is gauc, which is measured within groups, but the schema names none" in said
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--data", ""),
        ("train", "--data", "x", "--out="),
        ("predict", "run", "--out", "", "--data=x"),
        ("train", "--data=x", "--checkpoints", ""),
        ("train", "--data=x", "--publish="),
        ("train", "--data=x", "--workers=2", "--secret-file", ""),
        ("netcheck", "--secret-file="),
    ],
)
def test_an_empty_path_is_refused(arguments, rowhaul, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = rowhaul(*arguments)
    assert (code, " is empty; name a path" in on_one_line(err)) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_behind_an_equals_sign_is_the_home_folder(rowhaul, trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "home" / "run")
    code, out, err = rowhaul("report", tmp_path / "home" / "run", "--out=~/page.html")
    assert (code, str(tmp_path / "home" / "page.html") in out) == (0, True), err
    assert [one.name for one in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{one}",), "is not text in UTF-8; a file of settings in YAML or TOML is needed here"),
        (("--data", "{one}", "{two}"), "is not text in UTF-8; a file of settings in YAML or TOML"),
        (("{folder}",), "is a folder; a file of settings in YAML or TOML is needed here"),
        (("--data", "{one}", "{two}", "{two}"), "unexpected extra argument"),
        (
            ("--data", "part-0.parquet " * 60),
            "is too long for a name; if these are several files, give each its own",
        ),
    ],
    ids=["file", "two files", "folder", "three files", "a list"],
)
def test_data_without_its_option_is_told_how_to_be_named(arguments, said, rowhaul, log_folder, tmp_path):
    files = {"folder": log_folder, "one": log_folder / "part-0.parquet", "two": log_folder / "part-1.parquet"}
    code, _, err = rowhaul("train", *(one.format(**files) for one in arguments), "--out", tmp_path / "run")
    assert (code, said in on_one_line(err)) == (2, True), err
    assert "--data" in err
    assert not (tmp_path / "run").exists()


def test_a_run_to_resume_that_is_not_named_or_not_there_is_told(rowhaul, log_folder, tmp_path):
    for more in ((), ("--data", log_folder)):
        code, _, err = rowhaul("train", "--resume", *more)
        assert (code, "--resume needs to know which run: name its folder (--out)" in on_one_line(err)) == (
            2,
            True,
        )
        code, _, err = rowhaul("train", "--resume", "--out", tmp_path / "rum", *more, *SMALL)
        said = on_one_line(err)
        assert (code, f"{tmp_path / 'rum'} holds no run to resume" in said) == (2, True)
        assert "see whether its name is right" in said
    assert not (tmp_path / "rum").exists()


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (("--max-wait", "5s"), "a stream to read (--follow"),
        (("--stop-when-idle", "5s"), "a stream to read (--follow"),
        (("--publish-every", "5s"), "a folder to publish to (--publish)"),
        (("--publish-dense", "pt2"), "a folder to publish to (--publish)"),
        (("--evict", "lfu"), "a limit of rows (--max-rows)"),
    ],
    ids=lambda one: one[0] if isinstance(one, tuple) else "",
)
def test_a_flag_that_would_do_nothing_is_refused(options, needed, rowhaul, log_folder, tmp_path):
    run = ("train", "--data", log_folder, "--out", tmp_path / "run", *SMALL)
    code, _, err = rowhaul(*run, *options)
    assert (code, f"{options[0]} does nothing without {needed}" in on_one_line(err)) == (2, True), err
    assert not (tmp_path / "run").exists()


def test_a_label_beside_a_schema_is_not_ignored(rowhaul, trained, log_folder, tmp_path):
    other = ("--label", "bought", "--out", tmp_path / "run")
    code, _, err = rowhaul("train", "--data", log_folder, *other, *SMALL)
    assert (code, "schema.yaml is one, and its label is click" in on_one_line(err)) == (2, True)
    follow = ("--follow", "--stop-when-idle", "0.2s")
    code, _, err = rowhaul("train", "--data", log_folder, *follow, *other, *SMALL)
    assert (
        code,
        f"--label bought is for data without a schema, but the schema.yaml of {log_folder}"
        in on_one_line(err),
    ) == (2, True)
    code, _, err = rowhaul("train", "--resume", "--out", trained, "--label", "bought")
    assert (code, f"{trained}/schema.yaml is one, and its label" in on_one_line(err)) == (2, True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--rows", "100"),
        ("prepare", "--format", "criteo", "x.txt"),
        ("export", "run"),
        ("index", "run"),
        ("predict", "run", "--data", "x"),
        ("demo",),
        ("report", "run"),
    ],
)
def test_a_url_is_no_folder_of_this_machine(arguments, rowhaul, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = rowhaul(*arguments, "--out", "s3://bucket/x")
    said = f"--out s3://bucket/x is a URL, but {arguments[0]} writes to this machine: name a path"
    assert (code, said in on_one_line(err)) == (2, True)
    code, _, err = rowhaul(*arguments, "--out=file:///tmp/x")
    assert (code, "--out file:///tmp/x is a URL" in on_one_line(err)) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_more_rows_than_any_disk_holds_are_refused(rowhaul, tmp_path):
    for more in ((), ("--raw",)):
        code, _, err = rowhaul("generate", "--rows", "9" * 23, "--out", tmp_path / "log", *more)
        assert (code, "--rows must be from 1 to 1,099,511,627,776" in on_one_line(err)) == (2, True)
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--rows", "0"), "--rows must be from 1"),
        (("--rows", "9" * 23), "--rows must be from 1"),
        (("--seed", "-1"), "seed must be at least 0"),
        (("--live", "--seed", "-1"), "seed must be at least 0"),
        (("--live", "--rows", "10"), "--rows is not for --live"),
        (("--live", "--port", "70000"), "'--port': Input should be less than"),
        (("--seconds", "0"), "--seconds is for --live; add that"),
        (("--events", "10"), "--events is for --live; add that"),
        (("--port", "0"), "--port is for --live; add that"),
    ],
)
def test_a_demo_with_wrong_arguments_leaves_an_earlier_one_alone(arguments, named, rowhaul, tmp_path):
    (tmp_path / ".rowhaul-demo").touch()
    (tmp_path / "earlier").touch()
    code, _, err = rowhaul("demo", "--out", tmp_path, *arguments)
    assert (code, named in on_one_line(err)) == (2, True)
    assert (tmp_path / "earlier").exists()


def test_a_demo_empties_its_folder_wherever_that_is(tmp_path, monkeypatch):
    """The working directory and what a link leads to cannot be removed, only what is in them."""
    (tmp_path / "folder" / "logs").mkdir(parents=True)
    (tmp_path / "folder" / ".rowhaul-demo").touch()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "precious.txt").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "folder" / "run").symlink_to(tmp_path / "kept")
    monkeypatch.chdir(tmp_path / "folder")
    for out in (Path("."), tmp_path / "link"):
        (tmp_path / "folder" / "part").touch()
        _begin_folder(out)
        assert [path.name for path in (tmp_path / "folder").iterdir()] == [".rowhaul-demo"]
    assert (tmp_path / "kept" / "precious.txt").exists()
    with pytest.raises(ConfigError, match="is not from an earlier demo"):
        _begin_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"precious\.txt is a file"):
        _begin_folder(tmp_path / "kept" / "precious.txt")


@pytest.mark.slow
def test_a_cluster_does_not_start_anew_what_was_saved(log_folder, tmp_path):
    cluster = ("--workers", "2", "--colocated", "--set", "max_steps=2", "--out", tmp_path / "run")
    ended = train("--data", log_folder, *cluster)
    assert ended.returncode == 0, ended.stderr
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for more in (("--checkpoints", tmp_path / "typo"), ()):
        ended = train("--data", log_folder, *cluster, "--resume", *more)
        said = "checkpoints, the newest is step-000000002" if more else "says that one of step 2 was saved"
        assert (ended.returncode != 0, said in on_one_line(ended.stderr)) == (True, True), ended.stderr
        if more:
            shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
