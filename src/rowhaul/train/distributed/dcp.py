"""A cluster's model to and from `torch.distributed.checkpoint`, for people whose other state is saved there.

What a rank hands over is what it would write into a checkpoint of ours, so the same cluster, another one and
one process read the same bits. Caches and the schedule are left out: a cluster that loads it spreads the rows
anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from rowhaul.checkpoint import Place, as_place
from rowhaul.checkpoint.choosing import Chosen
from rowhaul.checkpoint.dcp import DcpReader, StateShard, manifest
from rowhaul.cluster.cluster import Cluster
from rowhaul.errors import ConfigError
from rowhaul.schedule.arrays import Arrays
from rowhaul.store.row_format import format_of
from rowhaul.train import saved_lifetimes, snapshot
from rowhaul.train.deferred import DeferredWriter
from rowhaul.train.distributed.checkpointing import Saved
from rowhaul.train.distributed.cluster_rows import ClusterRows, RankWriters, cluster_rows
from rowhaul.train.distributed.cluster_snapshot import LIFETIMES, table_names
from rowhaul.train.distributed.own_loop import LoopState

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

    from rowhaul.train.distributed.training import DistributedTraining


def state_of(training: DistributedTraining, optimizer: Optimizer) -> dict[str, Any]:
    """Return this rank's part of the model; see `DistributedTraining.state_dict`."""
    state = LoopState(training.model, optimizer, training.iteration, training.samples)
    rows = cluster_rows(format_of(training.layout), table_names(state))
    if type(rows) is not ClusterRows:
        raise ConfigError(
            f"{rows.format.name} rows have more to save than rows by key; use rowhaul.save_checkpoint"
        )
    training.catch_up()
    training.compare_replicas(optimizer)
    rank = training.runtime.rank
    writers = RankWriters(rank, beside=False, copies_rows=False)
    try:
        rows.take(training, writers)
        known = training.runtime.feed.at_rest(lambda scheduler: _lifetimes(scheduler.export()))
        if known:
            saved_lifetimes.write(writers.home, known, rows.tables)
        facts = snapshot.save_dense(state, writers.home) if rank == 0 else {}
        found: dict[str, Any] = {}
        shards = [
            _collected(writer, StateShard(label, found))
            for label, writer in ((writers.worker_label, writers.worker), (writers.label, writers.home))
        ]
    finally:
        rows.close()
    if rank == 0:  # a worker, and so it has all tables, though not all rows
        found["manifest"] = manifest(facts, shards[0].written.tables)
    return found


def find_dcp(
    cluster: Cluster,
    folder: str | Place,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    storage: StorageReader | None = None,
) -> Saved:
    """Load dense weights and optimizer from what `torch.distributed.checkpoint` saved; rows follow.

    Every rank calls it. Give what it returns to ``distribute(saved=...)``, which loads the rows, and let the
    data begin at its ``samples``. The number of ranks may be another than before.

    Args:
        cluster: that resumes.
        folder: the ``checkpoint_id`` that `training.state_dict()` was saved under.
        model: that the state is of; its dense weights are set.
        optimizer: of the dense weights.
        storage: what reads a place that is no folder.
    """
    state, reader = LoopState(model, optimizer), DcpReader(folder, storage)
    snapshot.restore_dense(state, reader)
    rows = cluster_rows(format_of(state.collection.row_settings), table_names(state))
    return Saved(cluster, reader, rows, Chosen(as_place(folder), {}))


def load_dcp(
    folder: str | Place, model: nn.Module, optimizer: Optimizer, *, storage: StorageReader | None = None
) -> dict[str, Any]:
    """Load a cluster's state, rows too, into a model of one process; returns its facts, as ``samples``."""
    state, reader = LoopState(model, optimizer), DcpReader(folder, storage)
    snapshot.restore_dense(state, reader)
    format_of(state.collection.row_settings).load(reader, state.collection)
    return reader.facts


def _collected(writer: DeferredWriter, shard: StateShard) -> StateShard:
    writer.write_to(shard, lambda: None)
    return shard


def _lifetimes(state: Arrays) -> Arrays:
    """Select what is known of rows that come and go, which is good on any cluster."""
    prefix = f"{LIFETIMES}."
    return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
