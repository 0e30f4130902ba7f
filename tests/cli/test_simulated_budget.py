"""`rowhaul simulate --memory-budget`: fewer rows move, and what is refused says why."""

import json

import pytest


def test_the_simulator_moves_less_within_a_budget(simulate, tmp_path):
    moved = {}
    for name, options in {"whole": (), "within": ("--memory-budget", "60KiB")}.items():
        path = tmp_path / f"{name}.json"
        code, _, errors = simulate(
            "--dispatch", "laia", "--no-subsets", "--cache", 400, "--json", path, *options
        )
        assert code == 0, errors
        (outcome,) = json.loads(path.read_text())["mechanisms"]
        moved[name] = sum(map(sum, outcome["bytes"].values()))
    assert 0 < moved["within"] < 0.8 * moved["whole"]  # rare ids read shared rows


def test_rows_within_a_budget_are_as_small_as_the_type_says(simulate, tmp_path):
    options = "--dispatch", "laia", "--no-subsets", "--cache", 400, "--memory-budget", "60KiB"
    path = tmp_path / "int8.json"
    code, _, errors = simulate(*options, "--dim", 64, "--row-dtype", "int8", "--json", path)
    assert code == 0, errors
    assert json.loads(path.read_text())["settings"]["row_bytes"] == [64 + 4] * 3  # and a scale


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory-budget", "60KiB", "--prune", "90%"), "exclude each other"),
        (("--memory-budget", "60KiB", "--hot", "5"), "no id has a row of its own then"),
        (("--memory-budget", "60KiB", "--ttl", "5"), "leave out --admit-after"),
        (("--memory-budget", "60KiB", "--sync", "bounded:2"), "which does not go together"),
        (("--memory-budget", "200b"), "give at least"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message, simulate):
    code, _, errors = simulate("--dispatch", "laia", *options)
    assert code == 2
    assert message in " ".join(errors.split())
