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


def of_tasks(log_loss, rmse, unknown=""):
    sizes = {name: 0 if name in unknown else 5 for name in "ab"}
    tasks = {"a": {"log_loss": log_loss, "num_samples": sizes["a"]}}
    tasks["b"] = {"rmse": rmse, "num_samples": sizes["b"]}
    return replace(values(9.0), tasks=tasks)


def is_over(patience, loss):
    patience.count(values(loss))
    return patience.is_over


def test_only_evaluations_in_a_row_count():
    patience = Patience(2)
    losses = [0.7, 0.6, 0.65, 0.5, 0.55, 0.5]  # as low as the best is no better
    assert [is_over(patience, loss) for loss in losses] == [False] * 5 + [True]
    assert "last 2 evaluations was not below 0.5" in patience.reason
    assert not any(is_over(Patience(0), loss) for loss in [1, 2, 3])
    assert is_over(Patience(1), float("nan"))


def test_of_several_labels_the_sum_counts():
    patience = Patience(1)
    for log_loss, rmse in ((1.0, 2.0), (1.5, 1.0)):
        patience.count(of_tasks(log_loss, rmse))
        assert not patience.is_over
    patience.count(of_tasks(0.5, 2.0))
    assert patience.is_over


def test_labels_that_no_sample_has_do_not_count():
    patience, nan = Patience(1), float("nan")
    for loss in (0.7, 0.6):
        patience.count(of_tasks(loss, nan, unknown="b"))
        patience.count(of_tasks(nan, nan, unknown="ab"))
        patience.count(replace(values(nan), num_samples=0))
        assert not patience.is_over
    patience.count(of_tasks(nan, 2.0))  # the model has diverged
    assert patience.is_over


def test_counting_goes_on_after_a_checkpoint():
    before = Patience(3)
    for loss in (0.6, 0.5, 0.55):
        before.count(values(loss))
    for most, ends_at in ((3, 2), (2, 1)):
        after = Patience(most)
        after.restore(json.loads(json.dumps(before.facts())))
        assert [is_over(after, 0.5) for _ in range(ends_at)] == [False] * (ends_at - 1) + [True]
    never, fresh = Patience(0), Patience(1)
    assert never.facts() == {}
    fresh.restore(never.facts())  # of a checkpoint that says nothing
    fresh.restore(json.loads(json.dumps(Patience(1).facts())))  # and of one before the first evaluation
    assert not is_over(fresh, 9.0)


@pytest.fixture(scope="module")
def config():
    return TrainConfig.from_dict(
        {
            "batch_size": 200, "epochs": 40, "eval_every": 5, "patience": 2, "rows": {"lr": 2.0},
            "model": {"name": "legacy", "embedding_dim": 4, "options": {"hidden": [8]}},
        }
    )  # fmt: skip


def lines_of(folder, kind):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def evaluations(folder):
    return [(line["step"], line["log_loss"]) for line in lines_of(folder, "eval")]


def test_a_run_ends_early_with_a_checkpoint_and_says_why(tmp_path, log_folder, log_schema, config):
    files = f"{log_folder}/*.parquet"
    result = train_run(config, log_schema, files, eval_data=f"{log_folder}/test", out=tmp_path / "run")
    losses = [loss for _, loss in evaluations(tmp_path / "run")]
    assert result.step == 5 * len(losses)  # the last one is not made again
    assert min(losses) == min(losses[:-2])
    assert any("ended early" in line["text"] for line in lines_of(tmp_path / "run", "note"))
    assert list((tmp_path / "run" / "checkpoints").glob(f"*{result.step}"))

    # Stopped after the last evaluation but one, or at the step of it, a run ends at the same step.
    for step in (result.step - 2, result.step - 5):
        folder = tmp_path / f"stopped-at-{step}"
        where = {"eval_data": f"{log_folder}/test", "out": folder}
        asked = iter([False] * (step - 1) + [True])
        stopped = train_run(config, log_schema, files, should_stop=asked.__next__, **where)
        assert stopped.interrupted
        assert stopped.step == step
        assert train_run(config, log_schema, files, resume=True, **where).step == result.step
        assert evaluations(folder) == evaluations(tmp_path / "run")


def test_a_run_that_has_ended_early_is_not_trained_on_unless_patience_grows(
    tmp_path, log_folder, log_schema, config
):
    data = {"data": f"{log_folder}/*.parquet", "eval_data": f"{log_folder}/test", "out": tmp_path / "run"}
    ended = train_run(config, log_schema, **data)
    again = train_run(config, log_schema, **data, resume=True)
    assert (again.step, again.steps_taken) == (ended.step, 0)
    assert again.metrics.log_loss == ended.metrics.log_loss
    longer = train_run(replace(config, patience=3), log_schema, **data, resume=True)
    assert longer.step > ended.step


def test_patience_needs_evaluations():
    with pytest.raises(
        ConfigError, match="patience is 2, but nothing is evaluated on the way: set eval_every"
    ):
        TrainConfig(patience=2)


def test_patience_needs_samples_to_evaluate_on(tmp_path, log_folder, log_schema, config):
    files, folder = f"{log_folder}/*.parquet", tmp_path / "run"
    with pytest.raises(ConfigError, match="patience is 2, but there are no samples to evaluate on"):
        train_run(config, log_schema, files, out=folder)
    short = replace(config, patience=0, max_steps=2)
    train_run(short, log_schema, files, out=folder)  # it was left as it was
    notes = [line["text"] for line in lines_of(folder, "note")]
    assert notes == [
        "eval_every is 5, but nothing is evaluated on the way: there are no samples for it (--eval-data)"
    ]
