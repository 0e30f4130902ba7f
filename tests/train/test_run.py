"""Runs in a folder: stopping, resuming to the same bits, and refusing what does not fit."""

import json
import shutil
from dataclasses import replace

import pytest
from test_trainer import state_bytes

from rowhaul.checkpoint import latest_checkpoint
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.train import TrainConfig, load_trained, train_run
from rowhaul.train.config import ModelConfig, OptimizerConfig, RateSchedule

CONFIG = TrainConfig(
    model=ModelConfig(embedding_dim=4, options={"dropout": 0.2}),
    rows=OptimizerConfig("adam", 0.01),
    rates=RateSchedule(warmup_steps=5, decay="cosine"),
    batch_size=256,
    epochs=2,
    shuffle_rows=1000,
    checkpoint_every=7,
)


def stop_after(num_steps):
    calls = iter(range(1, 10**6))
    return lambda: next(calls) >= num_steps


@pytest.mark.parametrize("stop_at", [1, 11, 24, 40])
def test_a_stopped_run_resumes_to_the_same_bits(stop_at, tmp_path, log_schema, log_folder):
    straight = train_run(CONFIG, log_schema, log_folder, out=tmp_path / "a", eval_data=log_folder / "test")
    assert straight.step == 2 * 24  # 6,000 samples in batches of 256, twice
    stopped = train_run(CONFIG, log_schema, log_folder, out=tmp_path / "b", should_stop=stop_after(stop_at))
    assert stopped.interrupted
    assert stopped.step == stop_at
    resumed = train_run(
        CONFIG, log_schema, log_folder, out=tmp_path / "b", resume=True, eval_data=log_folder / "test"
    )
    assert (resumed.step, resumed.metrics) == (straight.step, straight.metrics)
    trainers = [load_trained(tmp_path / name) for name in "ab"]
    assert state_bytes(trainers[0]) == state_bytes(trainers[1])


def test_a_run_killed_between_checkpoints_resumes_from_the_last(tmp_path, log_schema, log_folder):
    def killed():
        raise RuntimeError("killed")

    calls = stop_after(12)
    with pytest.raises(RuntimeError, match="killed"):
        train_run(
            CONFIG,
            log_schema,
            log_folder,
            out=tmp_path / "b",
            should_stop=lambda: killed() if calls() else False,
        )
    assert latest_checkpoint(tmp_path / "b" / "checkpoints").name == "step-000000007"
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "b", resume=True)
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "a")
    trainers = [load_trained(tmp_path / name) for name in "ab"]
    assert state_bytes(trainers[0]) == state_bytes(trainers[1])


def test_the_log_has_every_step_once(tmp_path, log_schema, log_folder):
    config = replace(CONFIG, log_every=1, eval_every=10, rates=RateSchedule())
    train_run(config, log_schema, log_folder, out=tmp_path / "r", should_stop=stop_after(9))
    # As a killed run leaves it: lines of steps after the checkpoint, the last one cut short.
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 12, "loss": 1}\n{"kind": "tr')
    train_run(config, log_schema, log_folder, out=tmp_path / "r", resume=True, eval_data=log_folder / "test")
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 49))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [10, 20, 30, 40, 48]
    assert list((tmp_path / "r" / "tensorboard").glob("events.*"))
    assert len(list((tmp_path / "r" / "checkpoints").iterdir())) == config.keep_checkpoints


def test_more_epochs_may_be_added(tmp_path, log_schema, log_folder):
    config = replace(CONFIG, rates=RateSchedule())
    train_run(config, log_schema, log_folder, out=tmp_path / "a")
    train_run(replace(config, epochs=1), log_schema, log_folder, out=tmp_path / "b")
    train_run(config, log_schema, log_folder, out=tmp_path / "b", resume=True)
    trainers = [load_trained(tmp_path / name) for name in "ab"]
    assert state_bytes(trainers[0]) == state_bytes(trainers[1])


def test_a_folder_in_use_is_left_alone(tmp_path, log_schema, log_folder):
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        train_run(CONFIG, log_schema, log_folder, out=tmp_path)
    with pytest.raises(ConfigError, match="holds no run to resume"):
        train_run(CONFIG, log_schema, log_folder, out=tmp_path, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_a_bad_configuration_leaves_no_folder(tmp_path, log_schema, log_folder):
    with pytest.raises(ConfigError, match="unknown model"):
        train_run(replace(CONFIG, model=ModelConfig("x")), log_schema, log_folder, out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, log_schema, log_folder):
    folder = tmp_path_factory.mktemp("finished") / "run"
    train_run(replace(CONFIG, max_steps=8), log_schema, log_folder, out=folder)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 128}, "was trained with batch_size = 256, now it is 128"),
        ({"max_steps": 20}, "was trained with max_steps = 8, now it is 20"),  # moves the decay
        ({"seed": 1}, "was trained with seed = 0, now it is 1"),
    ],
)
def test_resuming_with_other_settings_is_refused(change, message, finished, log_schema, log_folder):
    config = (
        replace(CONFIG, max_steps=8, **change) if "max_steps" not in change else replace(CONFIG, **change)
    )
    with pytest.raises(ConfigError, match=message):
        train_run(config, log_schema, log_folder, out=finished, resume=True)


def test_resuming_on_other_data_is_refused(finished, log_schema, log_folder):
    with pytest.raises(
        CheckpointError, match="was trained on 6,000 samples an epoch, but the data has 3,000"
    ):
        train_run(
            replace(CONFIG, max_steps=8), log_schema, log_folder / "part-0.parquet", out=finished, resume=True
        )


def test_a_checkpoint_of_another_model_is_refused(tmp_path, finished, log_schema, log_folder):
    shutil.copytree(finished, tmp_path / "run")
    replace(CONFIG, model=ModelConfig("legacy", 4)).write(tmp_path / "run" / "config.yaml")
    with pytest.raises(CheckpointError, match=r"is of another model \(dlrm\): weight .* absent"):
        load_trained(tmp_path / "run")
    replace(CONFIG, model=ModelConfig("dlrm", 8)).write(tmp_path / "run" / "config.yaml")
    with pytest.raises(CheckpointError, match="dim 4, adam, float32 there and dim 8, adam, float32 here"):
        load_trained(tmp_path / "run")


def test_a_folder_that_is_no_run_is_explained(tmp_path):
    with pytest.raises(CheckpointError, match="is no training run"):
        load_trained(tmp_path)
