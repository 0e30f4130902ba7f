"""Trains a few steps on a cluster and again in one process, and finds the largest difference.

There are two comparisons. *Plain*: one process trains whole batches; sums are taken in another order, so the
numbers are equal but for rounding. *Replay*: one process trains the very parts that the workers were
given, one after the other, and takes one step a batch; everything is added up in the same order, so not a bit
may differ. The first shows that the cluster trains the right model, the second that nothing is
lost in rounding: a stale row or a gradient that is counted twice cannot hide in it.

Ranks leave what they have trained as a checkpoint in a folder: `train_and_record`. One process reads it and
compares: `Recorded.read`, `train_alone`, `comparison.compare`. PyTorch gets one thread everywhere: with
another number it would add up in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rowhaul.checkpoint import CheckpointReader, latest_checkpoint
from rowhaul.cluster.checks import check_shared_folder, gather_texts
from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import RowhaulError
from rowhaul.nn import Batch
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.mover import Job
from rowhaul.schedule.plan import KIND_NAMES
from rowhaul.store.row_format import format_of
from rowhaul.store.row_parts import Arrays
from rowhaul.train import loop
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import checkpointing
from rowhaul.train.distributed.run import join_as_configured
from rowhaul.train.distributed.session import ClusterSession
from rowhaul.train.distributed.tables import layout_of
from rowhaul.train.metrics import MetricValues
from rowhaul.train.progressive import ProgressiveValues
from rowhaul.train.run_data import check_times
from rowhaul.train.run_folder import CHECKPOINTS
from rowhaul.train.trainer import Trainer
from rowhaul.tuning.hot_set.first_rows import profile_hot_rows
from rowhaul.verify.comparison import Trained
from rowhaul.verify.sent_gradients import SentGradients

Stepped = Callable[[int], None]
"""Called with the number of steps taken so far."""

_RECORDED = "recorded"  # fact of the checkpoint: what `Recorded` has beside what was trained


@dataclass(frozen=True)
class Recorded:
    """What a cluster has trained, who trained which sample, and what moved."""

    trained: Trained
    workers: list[npt.NDArray[np.int32]]  # of each batch: who trained each sample
    num_bytes: dict[str, int]  # moved, by kind
    hits: int
    lookups: int
    num_workers: int
    num_stores: int  # dedicated ones
    dispatcher: str
    sync: str

    @classmethod
    def read(cls, folder: Path, layout: TableLayout) -> Recorded:
        """Read what `train_and_record` has left in a folder."""
        path = latest_checkpoint(folder / CHECKPOINTS)
        assert path is not None
        reader = CheckpointReader(path)
        rows = {table: joined_rows(layout, table, reader.blocks(table)) for table in reader.tables}
        dense = {
            name: one.numpy() for name, one in reader.tensors("model").items() if one.is_floating_point()
        }
        facts = reader.facts[_RECORDED]
        trained = Trained(rows, dense, np.array(facts.pop("losses")))
        workers = [np.array(one, np.int32) for one in facts.pop("workers")]
        return cls(trained, workers, **facts)


def train_and_record(
    config: TrainConfig,
    schema: Schema,
    data: Any,
    folder: Path | None,
    *,
    stepped: Stepped = lambda steps: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Train as one rank of a cluster and leave what was trained in a folder; every rank calls it.

    Args:
        config: with ``max_steps``; the same on all ranks, as are schema and data.
        schema: of the data.
        data: files as `SampleStream` takes them.
        folder: of rank 0, for files of all ranks; what other ranks give is not used.
        stepped: called after every step, on rank 0.
        should_stop: asked in every iteration; when a rank stops, nothing is written.

    Returns:
        Whether training came to its end.
    """
    torch.set_num_threads(1)
    with join_as_configured(config.cluster) as cluster:
        shared = Path(gather_texts(cluster, "choosing a folder", str(folder or ""))[0])
        if len(cluster.hosts) > 1:
            instead = "give a folder that all hosts share, such as --work /mnt/shared"
            check_shared_folder(cluster, shared, "the comparison", instead)
        config = replace(config, checkpoints="", eval_every=0, patience=0)  # it keeps and evaluates nothing
        run = _RecordedRun(cluster, config, schema, data, None, None, False)
        try:
            losses = _Losses(stepped)
            run.training.runtime.should_stop = should_stop
            if loop.train(run, None, losses if cluster.rank == 0 else None).interrupted:
                return False
            facts = {_RECORDED: {**run.recorded(), "losses": losses.values}}
            checkpointing.save(cluster, run.training, run.trainer, shared / CHECKPOINTS, facts)
        finally:
            run.close()
    return True


class _Losses:
    """A run's listener that keeps the losses."""

    def __init__(self, stepped: Stepped) -> None:
        self.values: list[float] = []
        self._stepped = stepped

    def started(self, samples: int, total_samples: int) -> None:
        pass

    def stepped(self, samples: int, loss: float) -> None:
        self.values.append(loss)
        self._stepped(len(self.values))

    def evaluating(self, total_samples: int) -> None:
        pass

    def evaluated(self, step: int, metrics: MetricValues) -> None:
        pass

    def scored(self, step: int, values: ProgressiveValues) -> None:
        pass

    def noted(self, text: str) -> None:
        pass

    def explained(self, detail: dict[str, Any]) -> None:
        pass


class _RecordedRun(ClusterSession):
    """The run that `rowhaul train` makes, with a note of who trained what."""

    counts_rows = True

    def __init__(self, *arguments: Any) -> None:
        self._workers: list[npt.NDArray[np.int32]] = []
        self._num_bytes = np.zeros(len(KIND_NAMES) + 1, np.int64)
        self._hits = np.zeros(2, np.int64)  # and lookups
        super().__init__(*arguments)

    def iterated(self, job: Job) -> None:
        super().iterated(job)
        plan = job.plan
        self._workers.append(plan.worker.copy())
        self._num_bytes += [*plan.counts()[1].sum(axis=1).tolist(), plan.all_reduce_bytes]
        self._hits += [plan.hits.sum(), plan.lookups.sum()]

    def recorded(self) -> dict[str, Any]:
        """Return what `Recorded` has beside what was trained, and the losses."""
        topology = self.cluster.topology
        return {
            "workers": [one.tolist() for one in self._workers],
            "num_bytes": dict(zip((*KIND_NAMES, "all_reduce"), self._num_bytes.tolist(), strict=True)),
            "hits": int(self._hits[0]),
            "lookups": int(self._hits[1]),
            "num_workers": topology.num_workers,
            "num_stores": topology.num_ranks - topology.num_workers,
            "dispatcher": self.config.cluster.dispatcher,
            "sync": self.training.settings.sync,
        }


def joined_rows(layout: TableLayout, table: str, blocks: Iterable[Arrays]) -> Arrays:
    """Join the rows of a table, and refuse a row that is there twice."""
    format, every = format_of(layout), list(blocks)
    rows = format.join(every) if every else format.empty(layout, table)
    keys, times = np.unique(rows["keys"], return_counts=True)
    if (times > 1).any():
        raise RowhaulError(
            f"{(times > 1).sum():,} rows of table {table!r} are at home on two ranks, first key "
            f"{int(keys[times > 1][0])}; please report this"
        )
    return rows


def open_stream(config: TrainConfig, schema: Schema, data: Any) -> SampleStream:
    """The global batches of a run, as every rank of it reads them."""
    check_times(config, schema)
    return SampleStream(
        data,
        schema.without_group(),
        config.batch_size,
        epochs=config.epochs,
        shuffle_rows=config.shuffle_rows,
        seed=config.seed,
    )


def train_alone(
    config: TrainConfig,
    schema: Schema,
    data: Any,
    workers: Sequence[npt.NDArray[np.int32]] | None = None,
    *,
    stepped: Stepped = lambda steps: None,
) -> Trained:
    """Train in this process: whole batches or, where workers are given, the part of each in rank order."""
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    trainer, stream = Trainer(config, schema), open_stream(config, schema, data)
    trainer.check_keys(stream)
    trainer.total_steps = min(stream.num_batches, config.max_steps)
    hot = None
    if trainer.lifecycle is not None or workers is not None:
        hot = profile_hot_rows(stream, config.cluster, trainer.collection)
    if trainer.lifecycle is not None:  # hot rows are trained and kept, whatever policies say
        trainer.lifecycle.exempt(hot)
    sent = SentGradients.of(trainer.collection, hot) if workers is not None else None
    if workers is not None and hasattr(trainer.collection.source, "same_bits"):
        trainer.collection.source.same_bits = True  # as homes, on CPUs, step rows of workers on cards
    layout, format, losses = layout_of(trainer.collection), format_of(trainer.collection.row_settings), []
    for samples in islice(stream, trainer.total_steps):
        if workers is None:
            losses.append(trainer.train_step(trainer.prepare(samples)))
        else:
            if sent is not None:
                sent.workers = np.unique(workers[trainer.step])
            parts = _parts(samples, workers[trainer.step])
            batches = [trainer.moved(Batch.from_samples(part, global_size=len(samples))) for part in parts]
            losses.append(trainer.train_parts(Batch.from_samples(samples), batches))
        stepped(trainer.step)
    blocks = partial(format.blocks, trainer.collection)
    tables = [config.name for config in trainer.collection.table_configs()]
    rows = {table: joined_rows(layout, table, blocks(table)) for table in tables}
    return Trained(rows, _dense_of(trainer.model), np.array(losses))


def _parts(samples: Samples, worker: npt.NDArray[np.int32]) -> list[Samples]:
    return [samples.take(np.flatnonzero(worker == one)) for one in np.unique(worker)]


def _dense_of(model: nn.Module) -> dict[str, npt.NDArray[Any]]:
    """Dense weights, and buffers that may learn, by name."""
    both = (*model.named_parameters(), *model.named_buffers())
    return {name: one.detach().cpu().numpy().copy() for name, one in both if one.is_floating_point()}
