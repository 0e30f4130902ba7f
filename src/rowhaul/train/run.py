"""A training run in a folder: configuration, log, TensorBoard, checkpoints, and going on after a stop.

::

    run/
      config.yaml  schema.yaml     what was trained, on what
      metrics.jsonl                one line every ``log_every`` steps and for each evaluation
      tensorboard/                 the same for TensorBoard
      checkpoints/step-000001000/  see `rowhaul.checkpoint.layout`
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rowhaul.checkpoint import CheckpointReader, latest_checkpoint
from rowhaul.checkpoint.layout import finished_checkpoints, remove_unfinished, step_folder
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.pruning.report import PruneReport
from rowhaul.schedule.row_counts import RowCounts
from rowhaul.train import snapshot
from rowhaul.train.config import TrainConfig
from rowhaul.train.log import RunLog
from rowhaul.train.metrics import MetricValues
from rowhaul.train.trainer import Trainer

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
EVALUATION_BATCH = 8192
# Settings that may differ when a run goes on: they change what it tells or where, not what it learns.
_MAY_CHANGE = ("eval_every", "checkpoint_every", "keep_checkpoints", "log_every", "cluster")
_MAY_CHANGE_AT_CONSTANT_RATES = ("epochs", "max_steps")


class Listener(Protocol):
    """Who wants to know how a run is going."""

    def started(self, samples: int, total_samples: int) -> None:
        """Training begins at ``samples`` of ``total_samples``."""

    def stepped(self, samples: int, loss: float) -> None:
        """A step is done; ``samples`` counts all so far."""

    def evaluating(self, total_samples: int) -> None:
        """An evaluation begins."""

    def evaluated(self, step: int, metrics: MetricValues) -> None:
        """An evaluation is done."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    step: int
    steps_taken: int  # by this call; the others were taken before it resumed
    samples: int
    samples_per_second: float  # of training: without the first step, evaluations and checkpoints
    metrics: MetricValues | None
    interrupted: bool
    num_rows: int
    row_bytes: int  # values, optimizer state and index
    row_counts: RowCounts | None = None  # of this call, where rows of some tables come and go
    pruning: PruneReport | None = None  # what is left of rows, where they are pruned


def train_run(
    config: TrainConfig,
    schema: Schema,
    data: Any,
    *,
    out: str | Path | None = None,
    eval_data: Any = None,
    resume: bool = False,
    listener: Listener | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Train, evaluate and save; ``data`` and ``eval_data`` are files as `SampleStream` takes them.

    ``should_stop`` is asked after every step: a run that it ends is saved and can be resumed.
    """
    if resume and out is None:
        raise ConfigError("resume needs the folder of the run: give out")
    folder = Path(out) if out is not None else None
    if folder and resume:
        check_same_config(folder, config, schema)
    elif folder:
        check_new_folder(folder)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)  # for modules of a user's own; ours draw from generators of their own
    trainer = Trainer(config, schema)
    reader = _restore(trainer, folder) if folder and resume else None
    stream = SampleStream(
        data,
        schema,
        config.batch_size,
        epochs=config.epochs,
        shuffle_rows=config.shuffle_rows,
        seed=config.seed,
        start=trainer.samples,
    )
    evaluation = SampleStream(eval_data, schema, EVALUATION_BATCH) if eval_data else None
    for one in (stream, evaluation) if evaluation else (stream,):
        trainer.check_keys(one)
    if reader is not None:
        check_same_data(reader, stream)
    trainer.total_steps = min(trainer.step + stream.num_batches, config.max_steps or sys.maxsize)
    if folder:  # only now: what is wrong with configuration or data leaves no folder behind
        folder.mkdir(parents=True, exist_ok=True)
        config.write(folder / CONFIG_FILE)
        schema.write(folder / SCHEMA_FILE)
    with RunLog(folder, trainer.step) as log:
        return _Run(trainer, stream, evaluation, folder, log, listener).loop(should_stop)


class _Run:
    def __init__(
        self,
        trainer: Trainer,
        stream: SampleStream,
        evaluation: SampleStream | None,
        folder: Path | None,
        log: RunLog,
        listener: Listener | None,
    ) -> None:
        self.trainer, self.stream, self.evaluation = trainer, stream, evaluation
        self.folder, self.log, self.listener = folder, log, listener
        self.first_step = trainer.step

    def loop(self, should_stop: Callable[[], bool]) -> RunResult:
        trainer, config, total_steps = self.trainer, self.trainer.config, self.trainer.total_steps
        seconds, timed_samples, interrupted = 0.0, 0, False
        logged = (0, 0.0)  # samples and seconds at the latest line of the log
        metrics = None
        counted, pruning = RowCounts(), trainer.collection.pruning
        if self.listener:
            whole = config.epochs * self.stream.num_samples
            last = trainer.samples + (total_steps - trainer.step) * config.batch_size
            self.listener.started(trainer.samples, min(whole, last))
        began = time.perf_counter()
        for batch in self.stream.prepared(trainer.prepare) if trainer.step < total_steps else ():
            loss = trainer.train_step(batch)
            if trainer.step == self.first_step + 2:
                seconds, timed_samples, logged = 0.0, 0, (0, 0.0)  # the first may have compiled kernels
            seconds += time.perf_counter() - began
            timed_samples += len(batch)
            if self.listener:
                self.listener.stepped(trainer.samples, loss)
            if trainer.step % config.log_every == 0:
                rate = (timed_samples - logged[0]) / (seconds - logged[1])
                self.log.step(trainer.step, trainer.samples, loss, rate)
                logged = (timed_samples, seconds)
                if trainer.keeper is not None:
                    since, counted = trainer.keeper.counts - counted, trainer.keeper.counts
                    means = {name: one / config.log_every for name, one in since.by_name().items()}
                    self.log.rows(trainer.step, means)
            if pruning is not None and pruning.pruned_at == trainer.step:
                self.log.pruning(trainer.step, pruning.report())
            if trainer.step >= total_steps:
                break
            interrupted = should_stop()
            if interrupted:
                break
            if config.eval_every and trainer.step % config.eval_every == 0:
                metrics = self.evaluate()
            if config.checkpoint_every and trainer.step % config.checkpoint_every == 0:
                self.save()
            began = time.perf_counter()
        self.save()  # before an evaluation that might fail
        if not interrupted:
            metrics = self.evaluate()
        collection = trainer.collection
        return RunResult(
            step=trainer.step,
            steps_taken=trainer.step - self.first_step,
            samples=trainer.samples,
            samples_per_second=timed_samples / seconds if seconds else 0.0,
            metrics=metrics,
            interrupted=interrupted,
            num_rows=sum(collection.num_rows(one.name) for one in collection.embedding_bag_configs()),
            row_bytes=collection.allocated_bytes,
            row_counts=None if trainer.keeper is None else trainer.keeper.counts,
            pruning=None if pruning is None else pruning.report(),
        )

    def evaluate(self) -> MetricValues | None:
        if self.evaluation is None:
            return None
        if self.listener:
            self.listener.evaluating(self.evaluation.num_samples)
        metrics = self.trainer.evaluate(self.evaluation)
        self.log.evaluation(self.trainer.step, metrics)
        if self.listener:
            self.listener.evaluated(self.trainer.step, metrics)
        return metrics

    def save(self) -> None:
        if self.folder is None:
            return
        checkpoints = self.folder / CHECKPOINTS
        path = checkpoints / step_folder(self.trainer.step)
        if latest_checkpoint(checkpoints) != path:
            facts = {"samples_per_epoch": self.stream.num_samples, "data": self.stream.fingerprint}
            snapshot.save(self.trainer, path, facts)
        drop_old_checkpoints(checkpoints, self.trainer.config.keep_checkpoints)


def check_new_folder(folder: Path) -> None:
    """Refuse to start a run where something is already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists and is not empty; go on with it (--resume), or choose another --out"
        )


def check_same_config(folder: Path, config: TrainConfig, schema: Schema) -> None:
    """Refuse to go on with a run under settings that would teach it something else."""
    if not (folder / CONFIG_FILE).is_file() or not (folder / SCHEMA_FILE).is_file():
        raise ConfigError(f"{folder} holds no run to resume: it has no {CONFIG_FILE}; leave out --resume")
    before, now = TrainConfig.read(folder / CONFIG_FILE).to_dict(), config.to_dict()
    may_change = _MAY_CHANGE + (_MAY_CHANGE_AT_CONSTANT_RATES if config.rates.decay == "constant" else ())
    for name, value in before.items():
        if name not in may_change and now[name] != value:
            raise ConfigError(
                f"{folder} was trained with {name} = {value!r}, now it is {now[name]!r}; resume with the "
                "same value, or start a new run in another --out"
            )
    if Schema.read(folder / SCHEMA_FILE) != schema:
        raise ConfigError(f"{folder} was trained with another schema; resume on the same data")


def drop_old_checkpoints(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest complete checkpoints, and what interrupted saves left."""
    remove_unfinished(checkpoints)
    for old in finished_checkpoints(checkpoints)[:-keep]:
        shutil.rmtree(old)


def _restore(trainer: Trainer, folder: Path) -> CheckpointReader | None:
    """The newest checkpoint, loaded; None if the run stopped before its first."""
    checkpoint = latest_checkpoint(folder / CHECKPOINTS)
    if checkpoint is None:
        return None
    reader = snapshot.restore(trainer, checkpoint)
    if "cluster" not in reader.facts:  # of several processes each had its own
        torch.set_num_threads(reader.facts["threads"])  # another number sums in another order
    return reader


def check_same_data(reader: CheckpointReader, stream: SampleStream) -> None:
    """Refuse to go on with a checkpoint on other files than it was trained on."""
    if reader.facts["data"] != stream.fingerprint:
        raise CheckpointError(
            f"{reader.path} was trained on other files ({reader.facts['samples_per_epoch']:,} samples an "
            f"epoch, now {stream.num_samples:,}); resume on the same files, in the same order"
        )
