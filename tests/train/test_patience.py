"""Early stopping, on numbers and in a run."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rowhaul.errors import ConfigError
from rowhaul.train import TrainConfig, train_run
from rowhaul.train.metrics import binary_values
from rowhaul.train.patience import Patience


def values(loss):
    found = binary_values(np.array([0, 1]), np.array([0.0, 0.0]))
    return replace(found, log_loss=loss)


def test_only_evaluations_in_a_row_count():
    patience = Patience(2)
    losses = [0.7, 0.6, 0.65, 0.5, 0.55, 0.5]  # as low as the best is no better
    assert [patience.is_over(values(loss)) for loss in losses] == [False] * 5 + [True]
    assert "last 2 evaluations was not below 0.5" in patience.reason
    assert not any(Patience(0).is_over(values(loss)) for loss in [1, 2, 3])
    assert Patience(1).is_over(values(float("nan")))


def test_of_several_labels_the_sum_counts():
    patience = Patience(1)
    several = [{"a": {"log_loss": 1.0}, "b": {"rmse": 2.0}}, {"a": {"log_loss": 1.5}, "b": {"rmse": 1.0}}]
    assert not any(patience.is_over(replace(values(9.0), tasks=tasks)) for tasks in several)


def test_counting_goes_on_after_a_checkpoint():
    before = Patience(3)
    for loss in (0.6, 0.5, 0.55):
        before.is_over(values(loss))
    for most, ends_at in ((3, 2), (2, 1)):
        after = Patience(most)
        after.restore(json.loads(json.dumps(before.facts())))
        assert [after.is_over(values(0.5)) for _ in range(ends_at)] == [False] * (ends_at - 1) + [True]
    never, fresh = Patience(0), Patience(1)
    assert never.facts() == {}
    fresh.restore(never.facts())  # of a checkpoint that says nothing
    fresh.restore(json.loads(json.dumps(Patience(1).facts())))  # and of one before the first evaluation
    assert not fresh.is_over(values(9.0))


def test_a_run_ends_early_with_a_checkpoint_and_says_why(tmp_path, log_folder, log_schema):
    config = TrainConfig.from_dict(
        {
            "batch_size": 200, "epochs": 40, "eval_every": 5, "patience": 2, "rows": {"lr": 2.0},
            "model": {"name": "legacy", "embedding_dim": 4, "options": {"hidden": [8]}},
        }
    )  # fmt: skip
    files = f"{log_folder}/*.parquet"
    result = train_run(config, log_schema, files, eval_data=f"{log_folder}/test", out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["log_loss"] for line in lines if line["kind"] == "eval"]
    assert result.step == 5 * len(losses)  # the last one is not made again
    assert min(losses) == min(losses[:-2])
    assert any("ended early" in line.get("text", "") for line in lines)
    assert list((tmp_path / "run" / "checkpoints").glob(f"*{result.step}"))

    asked = iter(range(1, 1000))  # stopped after the last evaluation but one, it ends at the same step
    where = {"eval_data": f"{log_folder}/test", "out": tmp_path / "stopped"}
    stopped = train_run(config, log_schema, files, should_stop=lambda: next(asked) > result.step - 3, **where)
    assert stopped.interrupted
    assert result.step - 5 < stopped.step < result.step
    assert train_run(config, log_schema, files, resume=True, **where).step == result.step


def test_patience_needs_evaluations():
    with pytest.raises(
        ConfigError, match="patience is 2, but nothing is evaluated on the way: set eval_every"
    ):
        TrainConfig(patience=2)
