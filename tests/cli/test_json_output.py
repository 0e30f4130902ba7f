"""`--json`: which commands have it, and what they print with it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import typer

from rowhaul.cli.app import app
from rowhaul.cli.json_output import print_json

SMALL = ("--batch-size", "500", "--embedding-dim", "4", "--set", "model.options.top=[16]")
WITHOUT = {"rowhaul serve"}  # it prints where it listens, and runs until it is told to stop


def commands(group, path="rowhaul"):
    for name, one in group.commands.items():
        yield from commands(one, f"{path} {name}") if hasattr(one, "commands") else [(f"{path} {name}", one)]


def test_every_command_that_prints_a_result_prints_json():
    found = commands(typer.main.get_command(app))
    options = {name: {option for one in command.params for option in one.opts} for name, command in found}
    assert {name for name, those in options.items() if "--json" not in those} == WITHOUT


@pytest.fixture
def printed(rowhaul):
    """Run a command with --json; returns the object that is all of its standard output."""

    def run(*arguments):
        code, out, err = rowhaul(*arguments, "--json")
        assert code == 0, err
        assert out.count("\n") == 1
        return json.loads(out)

    return run


def test_numbers_paths_and_what_is_no_number(capsys):
    @dataclass
    class Found:
        path: Path
        auc: float
        rows: tuple

    print_json({"found": Found(Path("a/b"), math.nan, (np.int64(3), np.float32(0.5))), 7: math.inf})
    assert json.loads(capsys.readouterr().out) == {
        "found": {"path": "a/b", "auc": None, "rows": [3, 0.5]},
        "7": None,
    }


def test_generated_trained_and_reported(printed, tmp_path):
    log, run = tmp_path / "log", tmp_path / "run"
    made = printed("generate", "--rows", "2_000", "--out", log)
    assert (made["rows"], made["out"]) == (2_000, str(log))
    assert 0.5 < made["auc"] < 1
    trained = printed("train", "--data", log, "--out", run, *SMALL)
    assert (trained["out"], trained["samples"], trained["interrupted"]) == (str(run), 1_800, False)
    assert trained["metrics"]["num_samples"] == 200
    assert trained["peak_memory_bytes"] > trained["row_bytes"] > 0
    assert list(printed("report", run)["files"]) == [str(run / "report.html")]


def test_predicted_exported_merged_and_converted(printed, trained, log_folder, tmp_path):
    scores = printed("predict", trained, "--data", log_folder / "test", "--out", tmp_path / "scores.csv")
    assert scores["num_scores"] == len((tmp_path / "scores.csv").read_text().splitlines()) - 1
    exported = printed("export", trained, "--out", tmp_path / "tables")
    assert {one["name"] for one in exported["tables"]} >= {"user", "item"}
    merged = printed("ckpt", "merge", trained, "--out", tmp_path / "merged")
    assert {one["name"]: one["rows"] for one in merged["tables"]}["user"] > 0
    converted = printed("ckpt", "convert", trained, "--row-dtype", "int8", "--out", tmp_path / "int8")
    assert converted["bytes"] < converted["bytes_before"]


def test_prepared(printed, tmp_path):
    (tmp_path / "log.csv").write_text("click,user\n1,a\n0,b\n0,c\n1,d\n")
    (tmp_path / "schema.yaml").write_text("label: click\nids: [user]\n")
    given = ("prepare", tmp_path / "log.csv", "--format", "csv", "--schema", tmp_path / "schema.yaml")
    found = printed(*given, "--out", tmp_path / "data", "--test-share", "0.25")
    assert (found["rows"], found["test_rows"], found["folder"]) == (4, 1, str(tmp_path / "data"))
    assert found["guessed_types"] == {"user": "string"}
