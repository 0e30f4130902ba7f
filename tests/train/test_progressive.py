"""Progressive validation: the scores of training's own forward passes, window by window."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_tasks import ROWS, SCHEMA, config, write_log
from test_trainer import state_bytes

from rowhaul.data.schema import LabelColumn, Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError
from rowhaul.monitoring.run_monitor import RunMonitor
from rowhaul.nn import Batch
from rowhaul.train import TrainConfig, load_trained, train_run
from rowhaul.train.config import ModelConfig
from rowhaul.train.metrics import BinaryMetrics
from rowhaul.train.progressive import Progressive, Scores
from rowhaul.train.trainer import Trainer

CONFIG = TrainConfig(model=ModelConfig(embedding_dim=4), batch_size=256, progressive_window=1000)


def windows_of(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "progressive"]


def expected_windows(log_schema, log_folder):
    """Score each batch first, in a pass of its own, then learn from it; exact metrics by window."""
    trainer, windows, metrics = Trainer(CONFIG, log_schema), [], BinaryMetrics()
    for samples in SampleStream(log_folder, log_schema, CONFIG.batch_size):
        batch = Batch.from_samples(samples)
        with torch.no_grad():
            metrics.update(batch.labels, trainer.model(batch))
        trainer.train_step(batch)
        if trainer.samples // 1000 > (trainer.samples - len(batch)) // 1000:
            windows.append((trainer.step, metrics))
            metrics = BinaryMetrics()
    return windows


def test_windows_are_those_of_scoring_every_batch_before_learning_from_it(tmp_path, log_schema, log_folder):
    monitor = RunMonitor()
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "run", monitor=monitor)
    lines, expected = windows_of(tmp_path / "run"), expected_windows(log_schema, log_folder)
    assert [line["step"] for line in lines] == [step for step, _ in expected] == [4, 8, 12, 16, 20, 24]
    for line, (_, metrics) in zip(lines, expected, strict=True):
        values = metrics.compute()
        predicted = 1 / (1 + np.exp(-np.concatenate(metrics._logits).astype(np.float64)))
        assert line["num_samples"] == values.num_samples
        assert line["auc"] == pytest.approx(values.auc, abs=1e-6)
        assert line["log_loss"] == pytest.approx(values.log_loss, rel=1e-6)
        clicks = values.base_rate * values.num_samples
        assert line["calibration"] == pytest.approx(predicted.sum() / clicks, rel=1e-6)
    assert monitor.progressive["auc"] == lines[-1]["auc"]
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert [one.step for one in board.Scalars("progressive/calibration")] == [4, 8, 12, 16, 20, 24]


def test_training_learns_the_same_bits_with_and_without(tmp_path, log_schema, log_folder):
    config = replace(CONFIG, model=ModelConfig(embedding_dim=4, options={"dropout": 0.2}))
    for window in (0, 700):
        train_run(
            replace(config, progressive_window=window), log_schema, log_folder, out=tmp_path / str(window)
        )
    assert not windows_of(tmp_path / "0")
    assert state_bytes(load_trained(tmp_path / "0")) == state_bytes(load_trained(tmp_path / "700"))


def test_a_resumed_run_ends_its_windows_at_the_same_steps(tmp_path, log_schema, log_folder):
    calls = iter(range(1, 10**6))
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "run", should_stop=lambda: next(calls) >= 6)
    assert [line["step"] for line in windows_of(tmp_path / "run")] == [4, 6]
    train_run(CONFIG, log_schema, log_folder, out=tmp_path / "run", resume=True)
    lines = windows_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [4, 6, 8, 12, 16, 20, 24]
    assert sum(line["num_samples"] for line in lines) == 6000  # each sample once


def test_windows_without_both_classes_and_scores_far_out():
    assert math.isnan(Progressive(10).take(0).values().log_loss)
    values = Scores(np.zeros(3, np.uint8), np.array([-900.0, 0.0, 900.0], np.float32)).values()
    assert (math.isnan(values.auc), math.isnan(values.calibration), values.base_rate) == (True, True, 0.0)
    assert values.log_loss == pytest.approx((0 + math.log(2) + 900) / 3)
    assert [Progressive(100).steps_left(250, size) for size in (10, 50, 200)] == [5, 1, 1]
    with pytest.raises(ConfigError, match="progressive_window must be auto or 0 to 10,000,000 samples"):
        replace(CONFIG, progressive_window=-1)


@pytest.mark.slow
def test_workers_add_up_to_the_windows_of_one_process(tmp_path, log_folder):
    common = ["--data", str(log_folder), "--batch-size", "256", "--precision", "float64"]
    common += ["--embedding-dim", "4", "--set", "progressive_window=1000"]
    for name, more in (("alone", []), ("cluster", ["--workers", "3", "--stores", "1"])):
        command = [sys.executable, "-m", "rowhaul", "train", *common, *more, "--out", str(tmp_path / name)]
        subprocess.run(command, check=True, timeout=350)
    alone, cluster = windows_of(tmp_path / "alone"), windows_of(tmp_path / "cluster")
    assert len(alone) == 6
    for one, other in zip(alone, cluster, strict=True):
        assert other.pop("kind") == one.pop("kind")
        assert other == pytest.approx(one, rel=1e-6)  # logits are kept in float32


def test_of_several_labels_the_first_of_0_and_1_is_scored(tmp_path):
    schema = Schema.from_dict(SCHEMA | {"labels": [SCHEMA["labels"][2], "click"]})
    path = write_log(tmp_path)
    train_run(config(progressive_window=ROWS), schema, path, out=tmp_path / "run")
    (line,) = windows_of(tmp_path / "run")
    (samples,) = SampleStream(path, schema, ROWS)
    clicks = samples.labels[:, 1]
    assert line["num_samples"] == (~np.isnan(clicks)).sum()
    assert line["base_rate"] == np.nanmean(clicks.astype(np.float64))


def test_numbers_are_not_scored(log_schema):
    schema = replace(log_schema, label=LabelColumn("spent", kind="number"))
    stream = SimpleNamespace(key_kinds={}, num_batches=5, is_live=True)
    with pytest.raises(ConfigError, match=r"progressive_window is 1000, .* are numbers .spent.; set it to 0"):
        Trainer(CONFIG, schema).expect(stream, None)
    for label, is_scored in ((schema.label, False), (log_schema.label, True)):
        trainer = Trainer(replace(CONFIG, progressive_window="auto"), replace(schema, label=label))
        trainer.expect(stream, None)
        assert (trainer.progressive is not None) == is_scored
