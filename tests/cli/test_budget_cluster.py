"""A memory budget beside `--workers`: over real processes; what is refused says why."""

from __future__ import annotations

import json

import pytest

from rowhaul.train.run_folder import CHECKPOINTS


@pytest.mark.slow
def test_a_run_within_a_budget_on_a_cluster_is_one_process_s_to_read(rowhaul, log_folder, tmp_path):
    out = tmp_path / "run"
    code, _, errors = rowhaul(
        "train", "--data", f"{log_folder}/*.parquet", "--out", out, "--eval-data", log_folder / "test",
        "--workers", 2, "--stores", 1, "--memory-budget", "30KiB", "--batch-size", 64, "--embedding-dim", 8,
        "--set", "max_steps=14",
    )  # fmt: skip
    assert code == 0, errors
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    told = [line["text"] for line in lines if line["kind"] == "note"]
    assert [text.partition(":")[0] for text in told] == [
        "one machine",
        "rows changed hands 10 times up to step 10",
    ]
    (measured,) = (line for line in lines if line["kind"] == "eval")
    code, printed, errors = rowhaul("evaluate", out, "--data", log_folder / "test")
    assert code == 0, errors
    assert f"{measured['auc']:.4f}" in printed
    assert len(list((out / CHECKPOINTS).iterdir())) == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("hot_rows=auto", "cluster.hot_rows is auto"),
        ("sync=bounded:2", "cluster.sync is bounded:2"),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(option, message, rowhaul, log_folder, tmp_path):
    code, _, errors = rowhaul(
        "train", "--data", f"{log_folder}/*.parquet", "--out", tmp_path / "run", "--workers", 2,
        "--memory-budget", "30KiB", "--set", f"cluster.{option}",
    )  # fmt: skip
    assert code == 2
    assert message in " ".join(errors.split())
