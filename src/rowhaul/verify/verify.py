"""Trains a few steps on a cluster and again in one process, and finds the largest difference.

There are two comparisons. *Plain*: one process trains whole batches; sums are taken in another order, so the
numbers are equal but for rounding. *Replay*: one process trains the very parts that the workers were
given, one after the other, and takes one step a batch; everything is added up in the same order, so not a bit
may differ. The first shows that the cluster trains the right model, the second that nothing is
lost in rounding: a stale row or a gradient that is counted twice cannot hide in it.

Ranks leave what they have trained in a folder, as NumPy files: `train_and_record`. Whoever compares reads
it: `Recorded.read`, `train_alone`, `comparison.compare`. PyTorch gets one thread everywhere: with another
number it would add up in another order.

Pruned rows are left as a checkpoint. Which chunks there are follows from the ids alone, so both comparisons
keep the same ones; where utilities are of gradients, sums in another order may decide differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rowhaul.checkpoint import CheckpointReader, latest_checkpoint
from rowhaul.cluster.checks import check_shared_folder, gather_texts, require_all
from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import RowhaulError
from rowhaul.nn import Batch
from rowhaul.pruning.comparison import PrunedTrained, layout_as_saved, rows_of
from rowhaul.pruning.layout import ChunkLayout
from rowhaul.pruning.pool.state import row_arrays, stored_columns
from rowhaul.runtime.flush import flushed_blocks
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.mover import Job
from rowhaul.schedule.plan import KIND_NAMES
from rowhaul.train import loop
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import checkpointing
from rowhaul.train.distributed.run import ClusterSession, join_as_configured
from rowhaul.train.distributed.training import layout_of
from rowhaul.train.metrics import MetricValues
from rowhaul.train.run_folder import CHECKPOINTS
from rowhaul.train.trainer import Trainer
from rowhaul.tuning.hot_set.first_rows import profile_hot_rows
from rowhaul.verify.comparison import TableRows, Trained

Stepped = Callable[[int], None]
"""Called with the number of steps taken so far."""

_TRAINED, _HOME = "trained.npz", "home-{rank}.npz"
_WRITING_SECONDS = 600.0  # that ranks wait for each other's files


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

    @classmethod
    def read(cls, folder: Path, layout: TableLayout) -> Recorded:
        """What `train_and_record` has left in a folder."""
        rows: list[TableRows] = []
        if not isinstance(layout, ChunkLayout):
            rows = _read_rows(folder, layout)
        with np.load(folder / _TRAINED) as arrays:
            ends = np.cumsum(arrays["batch_sizes"])[:-1]
            moved = dict(zip((*KIND_NAMES, "all_reduce"), arrays["num_bytes"].tolist(), strict=True))
            hits, lookups = arrays["hits"].tolist()
            ranks = arrays["ranks"].tolist()
            dense = {
                name.removeprefix("dense."): arrays[name] for name in arrays if name.startswith("dense.")
            }
            workers, losses = np.split(arrays["workers"], ends), arrays["losses"]
        trained = Trained(rows, dense, losses)
        if isinstance(layout, ChunkLayout):
            trained = _read_pruned(folder, layout, trained)
        return cls(trained, workers, moved, hits, lookups, *ranks)


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
        stepped: told of every step, on rank 0.
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
        run = _RecordedRun(cluster, config, schema, data, None, None, False)
        try:
            losses = _Losses(stepped)
            run.training.runtime.should_stop = should_stop
            if loop.train(run, None, losses if cluster.rank == 0 else None).interrupted:
                return False
            run.write(shared, losses.values)
            if run.training.pruning is not None:
                checkpointing.save(cluster, run.training, run.trainer, shared / CHECKPOINTS)
            require_all(cluster, "writing what was trained", _WRITING_SECONDS)
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


class _RecordedRun(ClusterSession):
    """The run that `rowhaul train` makes, with a note of who trained what."""

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

    def write(self, folder: Path, losses: Sequence[float]) -> None:
        """Write the settled rows of this home; on rank 0 also all that is no row. A collective call."""
        flushed, home = self.training.flushed(), self.training.runtime.mover.home
        if home is not None and flushed is not None and self.training.pruning is None:
            blocks: dict[str, Any] = {}
            for table in range(len(home.layout.specs)):
                for number, (keys, records) in enumerate(flushed_blocks(home, flushed, table)):
                    blocks |= {f"{table}.{number}.keys": keys, f"{table}.{number}.records": records}
            np.savez(folder / _HOME.format(rank=self.cluster.rank), **blocks)
        if self.cluster.rank == 0:
            arrays: dict[str, Any] = {
                f"dense.{name}": array for name, array in _dense_of(self.trainer.model).items()
            }
            topology = self.cluster.topology
            arrays["ranks"] = [topology.num_workers, topology.num_ranks - topology.num_workers]
            arrays["workers"] = np.concatenate(self._workers)
            arrays["batch_sizes"] = [len(one) for one in self._workers]
            arrays["num_bytes"], arrays["hits"], arrays["losses"] = self._num_bytes, self._hits, losses
            np.savez(folder / _TRAINED, **arrays)


def _read_pruned(folder: Path, layout: ChunkLayout, rest: Trained) -> PrunedTrained:
    path = latest_checkpoint(folder / CHECKPOINTS)
    assert path is not None
    reader = CheckpointReader(path)
    layout = layout_as_saved(reader, layout)
    return PrunedTrained([], rest.dense, rest.losses, layout, rows_of(layout, reader.pruned_rows))


def _read_rows(folder: Path, layout: TableLayout) -> list[TableRows]:
    """The rows of all homes, by table."""
    blocks: list[list[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]] = [[] for _ in layout.specs]
    for path in sorted(folder.glob(_HOME.format(rank="*"))):
        with np.load(path) as arrays:
            for name in arrays:
                stem, _, what = name.rpartition(".")
                if what == "keys":
                    blocks[int(stem.partition(".")[0])].append((arrays[name], arrays[f"{stem}.records"]))
    rows = [TableRows.join(layout, table, some) for table, some in enumerate(blocks)]
    for spec, one in zip(layout.specs, rows, strict=True):
        twice = one.keys[:-1][one.keys[1:] == one.keys[:-1]]
        if len(twice):
            raise RowhaulError(
                f"{len(twice):,} rows of table {spec.name!r} are at home on two ranks, first key "
                f"{int(twice[0])}; please report this"
            )
    return rows


def open_stream(config: TrainConfig, schema: Schema, data: Any) -> SampleStream:
    """The global batches of a run, as every rank of it reads them."""
    return SampleStream(
        data,
        schema,
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
    if trainer.lifecycle is not None:  # hot rows are trained and kept, whatever policies say
        hot = profile_hot_rows(stream, config.cluster, trainer.collection)
        trainer.lifecycle.exempt(hot)
    losses = []
    for samples in islice(stream, trainer.total_steps):
        parts = [samples] if workers is None else _parts(samples, workers[trainer.step])
        batches = [Batch.from_samples(part, global_size=len(samples)) for part in parts]
        losses.append(trainer.train_parts(Batch.from_samples(samples), batches))
        stepped(trainer.step)
    if trainer.collection.pruning is not None:
        return _pruned_alone(trainer, np.array(losses))
    layout = layout_of(trainer.collection)
    rows = [
        TableRows.join(layout, table, list(trainer.collection.rows(spec.name)))
        for table, spec in enumerate(layout.specs)
    ]
    return Trained(rows, _dense_of(trainer.model), np.array(losses))


def _pruned_alone(trainer: Trainer, losses: npt.NDArray[np.float64]) -> PrunedTrained:
    """What training in this process has left of pruned rows."""
    layout, pruning = layout_of(trainer.collection), trainer.collection.pruning
    assert isinstance(layout, ChunkLayout)
    columns = np.stack([stored_columns(pruning, spec.name)["columns"] for spec in layout.rows])
    if columns.shape[1] < layout.rows[0].dim:
        layout = layout.narrowed(columns)
    rows = rows_of(layout, partial(row_arrays, pruning))
    return PrunedTrained([], _dense_of(trainer.model), losses, layout, rows)


def _parts(samples: Samples, worker: npt.NDArray[np.int32]) -> list[Samples]:
    return [samples.take(np.flatnonzero(worker == one)) for one in np.unique(worker)]


def _dense_of(model: nn.Module) -> dict[str, npt.NDArray[Any]]:
    """Dense weights, and buffers that may learn, by name."""
    both = (*model.named_parameters(), *model.named_buffers())
    return {name: one.detach().cpu().numpy().copy() for name, one in both if one.is_floating_point()}
