"""Pruning beside `--workers`: over real processes, and in the simulator; what is refused says why."""

from __future__ import annotations

import json

import pytest

from rowhaul.train.run_folder import CHECKPOINTS

pytestmark = pytest.mark.slow

NARROW = ("period=6", "dims=4", "cold_start=4", "chunks=2")


def test_a_pruned_run_on_a_cluster_is_one_process_s_to_read(rowhaul, log_folder, tmp_path):
    out = tmp_path / "run"
    options = [word for setting in NARROW for word in ("--set", f"prune.{setting}")]
    code, _, errors = rowhaul(
        "train", "--data", f"{log_folder}/*.parquet", "--out", out, "--eval-data", log_folder / "test",
        "--workers", 2, "--stores", 1, "--prune", "60%", "--batch-size", 64, "--embedding-dim", 8,
        "--set", "max_steps=14", *options,
    )  # fmt: skip
    assert code == 0, errors
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    told = [line["text"] for line in lines if line["kind"] == "note"]
    assert [text.partition(":")[0] for text in told] == [
        "one machine",
        "pruned after step 6",
        "pruned after step 12",
    ]
    assert not any("bytes of utilities" in text for text in told)  # ids say which rows are read
    (measured,) = (line for line in lines if line["kind"] == "eval")
    code, printed, errors = rowhaul("evaluate", out, "--data", log_folder / "test")
    assert code == 0, errors
    assert f"{measured['auc']:.4f}" in printed
    assert len(list((out / CHECKPOINTS).iterdir())) == 1


def test_the_simulator_moves_less_of_pruned_rows(simulate, tmp_path):
    moved = {}
    for name, options in {"whole": (), "pruned": ("--prune", "90%", "--prune-period", "4")}.items():
        path = tmp_path / f"{name}.json"
        code, _, errors = simulate("--dispatch", "laia", "--no-subsets", "--json", path, *options)
        assert code == 0, errors
        (outcome,) = json.loads(path.read_text())["mechanisms"]
        moved[name] = sum(map(sum, outcome["bytes"].values()))
    assert 0 < moved["pruned"] < 0.8 * moved["whole"]  # frequent rows stay, and move most


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("hot_rows=10", "cluster.hot_rows is 10"),
        ("sync=bounded:2", "cluster.sync is bounded:2"),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(option, message, rowhaul, log_folder, tmp_path):
    code, _, errors = rowhaul(
        "train", "--data", f"{log_folder}/*.parquet", "--out", tmp_path / "run", "--workers", 2,
        "--prune", "90%", "--set", f"cluster.{option}",
    )  # fmt: skip
    assert code == 2
    assert message in " ".join(errors.split())
