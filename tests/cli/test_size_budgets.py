"""`rowhaul size --budgets`: probes are trained within each budget and compared."""

import json

import pytest
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
