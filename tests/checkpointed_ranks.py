"""Runs of a cluster that save and resume, whose ranks are threads of this process, or processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from torch.distributed import HashStore

from click_logs import click_log
from rowhaul._threads import Failure
from rowhaul.checkpoint import CheckpointReader
from rowhaul.cluster.place import roles_of
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.data.stream import SampleStream
from rowhaul.schedule import HotRows, Topology
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import ModelConfig, OptimizerConfig, RateSchedule, TrainConfig
from rowhaul.train.distributed import checkpointing, setup
from rowhaul.train.distributed.beside_training import BesideTraining
from rowhaul.train.distributed.setup import distribute
from rowhaul.train.distributed.tables import layout_of
from rowhaul.train.run_folder import CHECKPOINTS, CONFIG_FILE
from rowhaul.train.trainer import Trainer, per_sample_loss, rate_factor
from rowhaul.transport.in_process import WAIT_SECONDS, InProcessNetwork

STEPS = 12
CONFIG = TrainConfig(
    model=ModelConfig(embedding_dim=4, options={"dropout": 0.2}),
    rows=OptimizerConfig("rowwise_adagrad", 0.05, {"initial_accumulator_value": 0.1}),
    dense=OptimizerConfig("SGD", 0.05, {"momentum": 0.5}),
    rates=RateSchedule(warmup_steps=3, decay="cosine"),
    batch_size=64,
    shuffle_rows=1000,
    max_steps=STEPS,
    precision="float64",
)
CLUSTER = ClusterConfig(workers=3, cache="190")


@dataclass(frozen=True)
class Session:
    """What every rank of a run does: train, pausing after some steps, and save after the last, or after each.

    ``posted`` are control records that rank 0 decides at a pause, ``replicated`` rows that are hot from one
    on. Such a run, when resumed, keeps the rows that were hot.
    """

    schema: Schema
    data: Path
    config: TrainConfig = CONFIG
    cluster: ClusterConfig = CLUSTER
    hot: Sequence[int] = ()  # keys of the first table
    pauses: Sequence[int] = (STEPS,)
    save_at: Sequence[int] = (STEPS,)
    beside: Sequence[int] = ()  # steps that are saved beside training
    finish_at: Sequence[int] | None = None  # pauses that wait for the save under way; by default all
    posted: dict[int, tuple[str, Any]] = field(default_factory=dict)
    replicated: dict[int, Sequence[int]] = field(default_factory=dict)  # keys of the first table
    resume: bool = False
    may_leave: bool = False  # with a share of 0

    @classmethod
    def on_log(cls, folder: Path, schema: Schema) -> Session:
        """On a small log, written into an empty folder."""
        pq.write_table(click_log(2000, 0), folder / "part-0.parquet", row_group_size=700)
        return cls(schema, folder)

    def run(self, cluster: Any, folder: Path) -> Trainer:
        """On one rank."""
        trainer = Trainer(self.config, self.schema)
        saved = checkpointing.find(cluster, folder / "checkpoints", trainer) if self.resume else None
        first = trainer.step
        stream = SampleStream(
            self.data,
            self.schema,
            self.config.batch_size,
            shuffle_rows=self.config.shuffle_rows,
            seed=self.config.seed,
            start=trainer.samples,
        )
        trainer.check_keys(stream)
        if saved is not None:
            saved.check_same_data(stream)
        trainer.total_steps = self.config.max_steps
        layout = layout_of(trainer.collection)
        settings = layout.schedule_settings(
            self.cluster,
            cluster.topology,
            hot=rows_of_first_table(self.hot) if self.hot else None,
            policies=trainer.policies,
        )
        if (self.replicated or not layout.keeps_hot_rows) and saved is not None:
            settings = saved.keep_hot(settings)
        training = distribute(
            cluster,
            trainer.model,
            stream,
            settings=settings,
            rates=lambda step: self.config.rows.lr * rate_factor(self.config.rates, step, STEPS),
            saved=saved,
            optimizer=trainer.dense if self.may_leave else None,
        )
        saving = BesideTraining(cluster)
        try:
            facts = {"samples_per_epoch": stream.num_samples, "data": stream.fingerprint}
            pauses = {*self.pauses, *self.save_at, *self.beside}
            for pause in sorted(one for one in pauses if one > first):
                if trainer.step in self.posted and cluster.rank == 0:
                    training.runtime.postbox.post(*self.posted[trainer.step])
                _train(trainer, training, pause)
                if pause in self.replicated:
                    training.replicate(rows_of_first_table(self.replicated[pause]))
                if self.finish_at is None or pause in self.finish_at:
                    saving.finish()
                if pause in self.beside:
                    checkpointing.save_beside(
                        cluster,
                        training,
                        trainer,
                        folder / CHECKPOINTS,
                        facts,
                        saving,
                        partial(_end_save, cluster.rank, pause),
                    )
                if pause in self.save_at:
                    saving.finish()
                    checkpointing.save(cluster, training, trainer, folder / CHECKPOINTS, facts)
            saving.finish()
        finally:
            saving.close()
            training.close()
        return trainer

    def on_threads(self, folder: Path) -> list[Trainer]:
        """On all ranks, each a thread."""
        if not folder.exists():
            folder.mkdir(parents=True)
            self.config.write(folder / CONFIG_FILE)
            self.schema.write(folder / SCHEMA_FILE)
        return on_threads(self.cluster.topology(), lambda cluster: self.run(cluster, folder))

    def interrupted(self, folder: Path, at: int, **changes: Any) -> None:
        """Save at a step and end; begin again, perhaps otherwise, and go on from there."""
        replace(self, save_at=[at], pauses=[p for p in self.pauses if p <= at]).on_threads(folder)
        replace(self, resume=True, **changes).on_threads(folder)


def rows_of_first_table(keys: Sequence[int]) -> HotRows:
    """Rows that may be hot."""
    return HotRows(np.zeros(len(keys), np.int32), np.array(keys, np.int64))


stepped: list[Callable[[], None]] = []  # called after every step of every worker
saves: list[tuple[int, int, Exception | None]] = []  # beside training, that have ended: rank, step, error


def _end_save(rank: int, step: int, error: Exception | None) -> None:
    saves.append((rank, step, error))


def tracking(cluster: Any, model: Any, stream: SampleStream, **more: Any) -> Any:
    """`distribute`, noting which rows change; tests put it in place of `distribute` here."""
    training = setup.distribute(cluster, model, stream, **more)
    training.track_changes()
    return training


def _train(trainer: Trainer, training: Any, until: int) -> None:
    for batch in training.batches(until - trainer.step):
        trainer.model.train()
        trainer.set_rates()
        loss = batch.loss(per_sample_loss(trainer.model(batch), batch))
        loss.backward()
        training.step(loss)
        trainer.dense.step()
        trainer.dense.zero_grad()
        trainer.step += 1
        trainer.samples += batch.global_size
        for call in stepped:
            call()
    assert training.iteration == until
    trainer.step, trainer.samples = until, until * trainer.config.batch_size


def contents(folder: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    """A checkpoint's rows, each by its name, and its dense tensors."""
    reader = CheckpointReader(folder / CHECKPOINTS / f"step-{step:09d}")
    found = {
        f"{group}/{name}": tensor.numpy()
        for group in ("model", "dense-optimizer")
        for name, tensor in reader.tensors(group).items()
    }
    for table, entry in reader.tables.items():
        num_rows = 0
        for keys, records in reader.rows(table):
            found |= {f"{table}/{key}": record for key, record in zip(keys.tolist(), records, strict=True)}
            num_rows += len(keys)
        assert num_rows == entry.num_rows == sum(name.startswith(f"{table}/") for name in found)
    return found


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether two checkpoints hold the very same."""
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Of all numbers of two checkpoints; all rows must be in both."""
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max(initial=0)) for name in one)


class ThreadCluster:
    """What a rank that is a thread sees of its cluster; every rank is a host of its own, and plans."""

    def __init__(self, rank: int, topology: Topology, network: InProcessNetwork, store: HashStore) -> None:
        self.rank, self.topology, self.store = rank, topology, store
        self.num_ranks = topology.num_ranks
        self.is_worker = rank < topology.num_workers
        self.roles = roles_of(topology.num_ranks, topology.num_workers)
        self.hosts = tuple((one,) for one in range(topology.num_ranks))
        self.local_ranks, self.leader = (rank,), rank
        self.moves, self.data, self.control = (
            network.links(rank),
            network.links(rank),
            network.collective(rank),
        )
        self.dense = network.collective(rank, range(topology.num_workers)) if self.is_worker else None
        self.failure, self.secret, self.has_abstract_sockets = Failure(), None, True
        self._meetings: dict[str, int] = {}

    def next_meeting(self, what: str) -> int:
        self._meetings[what] = self._meetings.get(what, -1) + 1
        return self._meetings[what]

    def forget(self, key: str) -> None:
        self.store.delete_key(key)

    def another_store(self) -> HashStore:
        return self.store


def on_threads(topology: Topology, work: Callable[[ThreadCluster], Any]) -> list[Any]:
    """What the work of each rank returns; the first error of any, with those of all as a note."""
    network, store = InProcessNetwork(topology.num_ranks), HashStore()
    clusters = [ThreadCluster(rank, topology, network, store) for rank in range(topology.num_ranks)]
    results: list[Any] = [None] * topology.num_ranks
    errors: dict[int, Exception] = {}

    def run(cluster: ThreadCluster) -> None:
        try:
            results[cluster.rank] = work(cluster)
        except Exception as error:
            errors[cluster.rank] = error
            network.fail(error)
            for other in clusters:
                other.failure.set(error)

    threads = [threading.Thread(target=run, args=[cluster], daemon=True) for cluster in clusters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1.25 * WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads), "ranks hang"
    if errors:
        first = next(iter(errors.values()))
        raise first
    return results
