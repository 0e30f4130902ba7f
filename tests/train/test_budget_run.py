"""Runs within a budget in one process: stopped or killed, resumed to the same bits, served and exported."""

from dataclasses import replace

import pytest
from test_trainer import state_bytes

from rowhaul.checkpoint.opening import open_checkpoint
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.export.export import export
from rowhaul.pruning.config import PruneConfig
from rowhaul.train import TrainConfig, load_trained, snapshot, train_run
from rowhaul.train.config import ModelConfig, OptimizerConfig
from rowhaul.train.trainer import Trainer
from save_threads import wait_for_saves
from slow_cases import mostly_slow

CONFIG = TrainConfig(
    model=ModelConfig(embedding_dim=8, options={"dropout": 0.2}),
    rows=OptimizerConfig("adagrad", 0.05),
    batch_size=256,
    epochs=2,
    shuffle_rows=1000,
    checkpoint_every=7,
    prune=PruneConfig(budget="8KiB", period=3),
)
PLAIN = replace(CONFIG, row_dtype="float32", prune=replace(CONFIG.prune, budget="12KiB"))
CONFIGS = pytest.mark.parametrize("config", [CONFIG, PLAIN], ids=["int8", "float32"])


def stop_after(num_steps):
    calls = iter(range(1, 10**6))
    return lambda: next(calls) >= num_steps


@CONFIGS
@pytest.mark.parametrize("stop_at", mostly_slow([2, 11, 40], 11))
def test_a_stopped_run_resumes_to_the_same_bits(stop_at, config, tmp_path, log_schema, log_folder):
    held_out = log_folder / "test"
    straight = train_run(config, log_schema, log_folder, out=tmp_path / "a", eval_data=held_out)
    assert straight.pruning.num_own == straight.pruning.num_slots < 500  # ids, which are more, compete
    train_run(config, log_schema, log_folder, out=tmp_path / "b", should_stop=stop_after(stop_at))
    resumed = train_run(config, log_schema, log_folder, out=tmp_path / "b", resume=True, eval_data=held_out)
    assert (resumed.step, resumed.metrics) == (straight.step, straight.metrics)
    trainers = [load_trained(tmp_path / name) for name in "ab"]
    assert state_bytes(trainers[0]) == state_bytes(trainers[1])


def test_saves_beside_training_change_no_bits(tmp_path, log_schema, log_folder):
    often = replace(CONFIG, checkpoint_every="1e-6s", keep_checkpoints=1000)
    train_run(often, log_schema, log_folder, out=tmp_path / "a", should_stop=wait_for_saves)
    train_run(replace(often, checkpoint_every="1d"), log_schema, log_folder, out=tmp_path / "b")
    trainers = [load_trained(tmp_path / name) for name in "ab"]
    assert state_bytes(trainers[0]) == state_bytes(trainers[1])


@CONFIGS
def test_an_export_serves_what_was_trained(config, tmp_path, log_schema, log_folder):
    held_out = log_folder / "test"
    result = train_run(config, log_schema, log_folder, out=tmp_path / "run", eval_data=held_out)
    export(open_checkpoint(tmp_path / "run"), tmp_path / "out")
    served = load_trained(tmp_path / "out")
    metrics = served.evaluate(SampleStream(held_out, log_schema, 8192))
    assert metrics.auc == pytest.approx(result.metrics.auc, abs=0 if config is PLAIN else 0.003)
    assert metrics.unknown_keys is None


def test_a_checkpoint_of_another_budget_or_kind_is_refused(tmp_path, log_schema, log_folder):
    train_run(replace(PLAIN, epochs=1), log_schema, log_folder, out=tmp_path / "run")
    (path,) = (tmp_path / "run" / "checkpoints").glob("step-000000024")
    others = {
        r"a budget of 12\.0 KiB .* here it is a budget of 20\.0 KiB": PruneConfig(budget="20KiB"),
        "4% of it shared; here": PruneConfig(budget="12KiB", shared=0.1),
        "slots": PruneConfig(),
    }
    for message, prune in others.items():
        with pytest.raises(CheckpointError, match=message):
            snapshot.restore(Trainer(replace(PLAIN, prune=prune), log_schema), path)
    with pytest.raises(ConfigError, match="was trained with prune"):
        train_run(
            replace(PLAIN, epochs=1, prune=PruneConfig(budget="20KiB")),
            log_schema, log_folder, out=tmp_path / "run", resume=True,
        )  # fmt: skip
