"""`rowhaul size --budgets`: probes are trained within each budget and compared."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from rowhaul.cli.app import app


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    ran = CliRunner().invoke(app, ["generate", "--rows", "6000", "--out", str(folder / "log")])
    assert ran.exit_code == 0, ran.output
    return folder / "log"


def sized(*arguments):
    return CliRunner().invoke(app, ["size", *map(str, arguments)])


def no_space(*_):
    raise OSError(28, "No space left on device")


def test_budgets_are_kept_and_compared_with_all_rows(log, tmp_path, monkeypatch):
    options = ("--data", log, "--batch-size", 256, "--probe-steps", 8, "--plot", tmp_path / "trade.png")
    patient = ("--eval-every", 2, "--set", "patience=1")  # of a whole run, not of its probes
    ran = sized(*options, *patient, "--budgets", "128KiB,512KiB", "--json")
    assert ran.exit_code == 0, ran.output
    whole, large, small = json.loads(ran.stdout)["probes"]
    assert [whole["budget"], large["budget"], small["budget"]] == [0, 512 << 10, 128 << 10]
    assert small["row_bytes"] <= 128 << 10 < large["row_bytes"] <= 512 << 10 < whole["row_bytes"]
    assert 0.4 < small["auc"] < 1
    assert (tmp_path / "trade.png").read_bytes().startswith(b"\x89PNG")
    # However few steps are tried, rows are held as the whole run would hold them.
    monkeypatch.setattr("rowhaul.sizing.trade.draw", no_space)  # what was measured is told all the same
    shorter = sized(*options, "--probe-steps", 1, "--budgets", "128KiB", "--json")
    assert isinstance(shorter.exception, OSError)
    assert [json.loads(shorter.stdout)["probes"][1][name] for name in ("dim", "row_dtype")] == [
        small[name] for name in ("dim", "row_dtype")
    ]


def test_a_label_that_is_a_number_is_compared_by_its_rmse(log, tmp_path):
    for name in ("part-00000.parquet", "test/part-00000.parquet"):
        table = pq.read_table(log / name)
        seconds = pa.array(np.random.default_rng(1).exponential(3.0, len(table)).astype(np.float32))
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(table.append_column("seconds", seconds), tmp_path / name)
    schema = yaml.safe_load((log / "schema.yaml").read_text())
    del schema["label"]
    schema["labels"] = [{"name": "seconds", "kind": "number"}]
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump(schema))
    options = ("--data", tmp_path / "*.parquet", "--eval-data", tmp_path / "test", "--batch-size", 256)
    ran = sized(*options, "--budgets", "128KiB", "--probe-steps", 3, "--plot", tmp_path / "trade.png")
    assert ran.exit_code == 0, ran.output
    assert "RMSE of seconds" in ran.output
    assert "nan" not in ran.output
    assert (tmp_path / "trade.png").exists()


@pytest.mark.parametrize(("arguments", "message"), [
    (["--budgets", "4"], "--budgets"),
    (["--budgets", "1MiB", "--probe-steps", "0"], "at least one step"),
    (["--budgets", "1MiB", "--plot", "trade.txt"], ".png, .pdf or .svg"),
    (["--budgets", "1MiB", "--plot", "missing/trade.png"], "there is no folder missing"),
    (["--budgets", "1MiB", "--memory-budget", "1MiB"], "leave out --prune, --memory-budget"),
    (["--budgets", "100b"], "give at least"),
])  # fmt: skip
def test_what_cannot_be_tried_is_refused(log, arguments, message):
    ran = sized("--data", log, "--batch-size", 256, "--probe-steps", 2, *arguments)
    assert ran.exit_code != 0
    assert message in " ".join((ran.output + str(ran.exception)).split())


def test_a_plot_does_not_replace_what_is_none(log, tmp_path):
    path = tmp_path / "trade.pdf"
    path.write_text("years of work")
    ran = sized("--data", log, "--batch-size", 256, "--budgets", "128KiB", "--plot", path)
    assert ran.exit_code != 0
    assert "exists and is something else than this command writes" in " ".join(
        (ran.output + str(ran.exception)).split()
    )
    assert path.read_text() == "years of work"
