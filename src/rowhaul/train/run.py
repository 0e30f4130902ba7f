"""A training run in one process: from files to a trained model in a folder, resumed to the same bits."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rowhaul.checkpoint import CheckpointReader, Place, latest_checkpoint
from rowhaul.checkpoint.choosing import Chosen, choose
from rowhaul.checkpoint.layout import step_folder
from rowhaul.checkpoint.location import local_folder, storage_of
from rowhaul.data.schema import Schema
from rowhaul.data.sources.live import Idle, LiveStream
from rowhaul.data.sources.opening import stream_of
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError
from rowhaul.explain.alone import AloneExplainer
from rowhaul.monitoring.monitor import NO_MONITOR, Monitor
from rowhaul.nn import Batch
from rowhaul.nn.row_source import CachedOverHost
from rowhaul.schedule.plan import RowCounts
from rowhaul.train import loop, snapshot
from rowhaul.train.config import TrainConfig
from rowhaul.train.log import TrainingLog
from rowhaul.train.metrics import MetricValues
from rowhaul.train.ranking import check_grouped
from rowhaul.train.run_data import check_same_data, check_times, read_contents
from rowhaul.train.run_folder import (
    NOTHING_SAVED,
    PROBE,
    begin_folder,
    check_new_run,
    check_same_run,
    checkpoints_of,
)
from rowhaul.train.run_lock import RunLock
from rowhaul.train.run_stream import check_streamable, keep_set_aside, open_stream
from rowhaul.train.save_thread import Pacer, SaveThread
from rowhaul.train.session import Listener, RunResult, Saved, Session, ShouldStop
from rowhaul.train.trainer import Trainer
from rowhaul.train.waits import Waits

if TYPE_CHECKING:
    from rowhaul.publishing.publisher import Publisher

EVALUATION_BATCH = 8192
Streams = tuple[SampleStream, SampleStream | None]  # to train and to evaluate on


def train_run(
    config: TrainConfig,
    schema: Schema,
    data: Any,
    *,
    out: str | Path | None = None,
    eval_data: Any = None,
    resume: bool = False,
    listener: Listener | None = None,
    should_stop: ShouldStop = lambda: False,
    monitor: Monitor = NO_MONITOR,
    threads: int = 0,
) -> RunResult:
    """Train, evaluate and save; ``data`` and ``eval_data`` are files as `SampleStream` takes them.

    ``should_stop`` is asked after every step: a run that it ends is saved and can be resumed. ``monitor``
    follows the run. ``threads``, if given, are used instead of those that the settings say.
    """
    config.check_alone()
    folder = local_folder(out) if out is not None else None
    checkpoints = checkpoints_of(config, folder)
    if resume and checkpoints is None:
        raise ConfigError("resume needs to know where the run is: give its folder (out), or its checkpoints")
    if threads := threads or config.threads:
        torch.set_num_threads(threads)
    torch.manual_seed(config.seed)  # for modules of a user's own; ours draw from generators of their own
    with RunLock(folder) if folder is not None else nullcontext() as lock:
        chosen = _begin(folder, checkpoints, config, schema, resume)
        if chosen is None:  # runs of earlier versions go on
            check_grouped(config.metrics, schema)
        trainer = Trainer(config, schema)
        reader = _restore(trainer, chosen) if chosen is not None else None
        stream, evaluation, extended = _open_data(trainer, reader, data, eval_data, folder)
        if config.publish.is_used:
            from rowhaul.publishing.publisher import check_folder  # it takes a while to import

            check_folder(config.publish.path, folder, reader)
        if folder:
            begin_folder(folder, config, schema, data, eval_data)
        notes = [lock.note] if lock is not None and lock.note else []
        if chosen is not None:
            chosen.set_damaged_aside()
            notes += chosen.notes
        elif resume:
            notes.append(NOTHING_SAVED)
        publisher = _publisher(trainer, folder, reader)
        with _Alone(trainer, stream, evaluation, folder, should_stop, monitor, publisher) as session:
            session.first_note = extended
            if session.explainer is not None and listener is not None:
                session.explainer.show = listener.explained
            return loop.train(session, checkpoints, listener, notes)


def _begin(
    folder: Path | None, checkpoints: Place | None, config: TrainConfig, schema: Schema, resume: bool
) -> Chosen | None:
    """Check that a run may begin or resume; returns what it resumes from, if anything is saved."""
    if checkpoints is not None and storage_of(checkpoints).is_shared:
        storage_of(checkpoints).check_writable(checkpoints, PROBE)
    if not resume or checkpoints is None:
        check_new_run(folder, checkpoints)
        return None
    chosen = choose(checkpoints)
    check_same_run(folder, chosen.path if chosen is not None else None, config, schema)
    return chosen


def _open_data(
    trainer: Trainer, reader: CheckpointReader | None, data: Any, eval_data: Any, folder: Path | None
) -> tuple[SampleStream | LiveStream, SampleStream | None, str]:
    """Open the data of a run, compare it with the checkpoint's; returns also what to note of it."""
    config, schema, given = trainer.config, trainer.schema, stream_of(data, trainer.config.stream.follow)
    if given is None:
        files, evaluation = open_streams(config, schema, data, eval_data, trainer.samples)
        trainer.expect(files, evaluation)
        extended = check_same_data(reader, files, config) if reader is not None else ""
        if folder and reader is not None:
            read_contents(folder, files, verify=True)
        return files, evaluation, extended
    check_streamable(config)
    stream = open_stream(config, schema, given, reader, trainer.samples, trainer.key_kinds)
    evaluation = SampleStream(eval_data, schema, EVALUATION_BATCH) if eval_data else None
    trainer.expect(stream, evaluation)
    return stream, evaluation, ""


def open_streams(config: TrainConfig, schema: Schema, data: Any, eval_data: Any, start: int) -> Streams:
    """Open the files to train on, from sample ``start``, and those to evaluate on."""
    check_times(config, schema)
    stream = SampleStream(
        data,
        schema.without_group(),
        config.batch_size,
        epochs=config.epochs,
        shuffle_rows=config.shuffle_rows,
        seed=config.seed,
        start=start,
    )
    return stream, SampleStream(eval_data, schema, EVALUATION_BATCH) if eval_data else None


class _Alone(Session):
    """The session of a single process."""

    def __init__(
        self,
        trainer: Trainer,
        stream: SampleStream | LiveStream,
        evaluation: SampleStream | None,
        folder: Path | None,
        should_stop: ShouldStop,
        monitor: Monitor,
        publisher: Publisher | None,
    ) -> None:
        self._publisher = publisher
        self.more_facts = {} if publisher is None else publisher.facts
        self.trainer, self.stream, self.evaluation = trainer, stream, evaluation
        self.log = _Log(folder, trainer, monitor)
        self.contents_folder = folder
        self._should_stop = should_stop
        self._batches: Generator[Batch | Idle, None, None] = stream.prepared(trainer.prepare)
        self._saved_step = trainer.step  # when a save by the clock was last asked for
        self._saving = SaveThread()
        self._waits = Waits()
        config = trainer.config
        explains = config.monitoring.explain
        self.explainer = AloneExplainer(config.log_every, trainer.step, folder) if explains else None

    def __enter__(self) -> _Alone:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self._saving.finish()  # it was taken before the error
            if self._publisher is not None:
                self._publisher.finish()
        else:  # the user wants to leave at once
            self._saving.close()
            if self._publisher is not None:
                self._publisher.close()
        self._batches.close()
        if isinstance(self.stream, LiveStream):
            self.stream.source.close()
        if self.explainer is not None:
            self.explainer.close()

    def batches(self, count: int) -> Iterator[Batch]:
        """Yield the next batches, until asked to stop."""
        began = time.perf_counter()
        while count > 0:
            batch = next(self._batches, None)
            if isinstance(self.stream, LiveStream):
                self._report(self.stream)
            if batch is None:
                self.finished = True
                return
            if not isinstance(batch, Idle):
                self._waits.loaded(time.perf_counter() - began)
                if self.explainer is not None:
                    self.explainer.loaded(time.perf_counter() - began)
                yield batch
                count -= 1
                began = time.perf_counter()
            if self.trainer.step < self.trainer.total_steps and self._is_asked():
                return

    def _is_asked(self) -> bool:
        """Look whether the run is to stop, or to be saved; not twice after one step."""
        self.stopped = self._should_stop()
        self.save_due = self.trainer.step > self._saved_step and self.should_save()
        if self.save_due:
            self._saved_step = self.trainer.step
        self.publish_due = self._publisher is not None and self.should_publish()
        return self.stopped or self.save_due or (self.publish_due and self._can_publish())

    def _can_publish(self) -> bool:
        """Whether there is something to publish, and nothing is being written."""
        publisher = self._publisher
        return publisher is not None and publisher.is_free and publisher.taken_step != self.trainer.step

    def _report(self, stream: LiveStream) -> None:
        """Tell what happened in a stream."""
        for note in stream.news():
            self.tell(note)
        keep_set_aside(self.contents_folder, stream)

    def train(self, batch: Batch) -> float:
        """Take one step."""
        began = time.perf_counter()
        loss = self.trainer.train_step(batch)
        self._waits.computed(time.perf_counter() - began)
        if self.explainer is not None:
            self.explainer.computed(time.perf_counter() - began)
        return loss

    @property
    def waits(self) -> str:
        """Which of reader and card waits, where there is one."""
        return self._waits.text() if self.trainer.device.type != "cpu" else ""

    def finish(self) -> None:
        """Write what was measured."""
        if self.waits:
            self.log.note(self.trainer.step, f"waits: {self.waits}")
        if self.explainer is not None:
            self.explainer.finish()

    def evaluate(self) -> MetricValues:
        """Measure the model on the evaluation data."""
        assert self.evaluation is not None
        return self.trainer.evaluate(self.evaluation)

    def save(self, checkpoints: Place, facts: dict[str, Any]) -> None:
        """Save a checkpoint of this step, unless there is one."""
        path = checkpoints / step_folder(self.trainer.step)
        self._saving.finish()
        if latest_checkpoint(checkpoints) != path:
            snapshot.save(self.trainer, path, facts)

    def save_beside(self, checkpoints: Place, facts: dict[str, Any], done: Saved, *, waits: bool) -> bool:
        """Save a checkpoint of this step beside training."""
        if waits:
            self._saving.finish()
        path = checkpoints / step_folder(self.trainer.step)
        if self._saving.is_busy or latest_checkpoint(checkpoints) == path:
            return False
        taken = snapshot.Snapshot(self.trainer, facts)

        def write(pacer: Pacer) -> None:
            pacer.hurry_when(taken.is_crowded)
            try:
                taken.write(path, pacer)
            finally:
                taken.close()

        self._saving.start(write, done)
        return True

    def publish_beside(self, done: Saved, *, waits: bool) -> bool:
        """Publish what changed beside training."""
        assert self._publisher is not None
        for trouble in self._publisher.troubles():
            self.tell(trouble)
        return self._publisher.publish_beside(self._event_time, done, waits=waits)

    def publish_last(self, done: Saved) -> None:
        """Publish the model at the end, unless it is published."""
        assert self._publisher is not None
        self._publisher.finish()
        if not self._publisher.is_current:
            self._publisher.publish_beside(self._event_time, done, waits=True)
            self._publisher.finish()

    @property
    def _event_time(self) -> float | None:
        return self.stream.event_time if isinstance(self.stream, LiveStream) else None

    def num_rows(self) -> int:
        """Count rows."""
        return self.held()[0]

    def held(self) -> tuple[int, int]:
        """Count rows and their bytes."""
        collection = self.trainer.collection
        num_rows = sum(collection.num_rows(one.name) for one in collection.table_configs())
        return num_rows, collection.allocated_bytes


def _publisher(trainer: Trainer, folder: Path | None, reader: CheckpointReader | None) -> Publisher | None:
    """Begin to publish, or go on with it, if that is asked for."""
    if not trainer.config.publish.is_used:
        return None
    from rowhaul.publishing.publisher import Publisher, run_name

    return Publisher(trainer, run_name(folder, reader), reader)


class _Log(TrainingLog):
    """Logs what a row source and policies did, besides steps."""

    def __init__(self, folder: Path | None, trainer: Trainer, monitor: Monitor) -> None:
        super().__init__(folder, trainer.step, trainer.config.log_every, monitor)
        self._trainer, self._counted = trainer, RowCounts()
        self._counted_step = trainer.step  # to which those were counted
        self._count_rows()

    def _count_rows(self) -> None:
        if self._trainer.lifecycle is not None:
            self.row_counts = self._trainer.lifecycle.counts

    def stepped(self, step: int, samples: int, loss: float) -> None:
        """Log a step."""
        self._count_rows()
        super().stepped(step, samples, loss)
        for note in self._trainer.collection.source.notes():
            self.row_note(step, note)

    def write_more(self, step: int) -> None:
        """Log how policies admitted and dropped rows, a step, on average."""
        collection = self._trainer.collection
        names = [one.name for one in collection.table_configs()]
        self.monitor.hold({name: collection.num_rows(name) for name in names})
        if isinstance(collection.source, CachedOverHost):
            self.write("device_cache", step, collection.source.take_counts())
        if self.row_counts is not None:
            since, self._counted = self.row_counts - self._counted, self.row_counts
            steps, self._counted_step = step - self._counted_step, step
            self.write("tables", step, {name: one / steps for name, one in since.by_name().items()})


def _restore(trainer: Trainer, chosen: Chosen) -> CheckpointReader:
    """Load a checkpoint."""
    reader = snapshot.restore(trainer, chosen.path)
    trainer.recall_evaluations(reader.facts)
    if "cluster" not in reader.facts:  # of several processes each had its own
        torch.set_num_threads(reader.facts["threads"])  # another number sums in another order
    return reader
