"""A training run on a cluster, in a folder: the twin of `rowhaul.train.run` for several ranks.

Every rank runs it. Rank 0 keeps the log and talks to the user; rows are saved by the ranks that
store them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rowhaul.cluster import join
from rowhaul.cluster.checks import check_same, check_shared_folder
from rowhaul.cluster.cluster import Cluster
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.errors import ConfigError
from rowhaul.nn import BatchNorm1d
from rowhaul.planning.rank0_data.feed import data_bytes
from rowhaul.pruning.cluster.settings import schedule_settings
from rowhaul.runtime.mover import Job
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import checkpointing
from rowhaul.train.distributed.data_streams import (
    evaluation_batches,
    hot_rows_for_all,
    open_streams,
    schema_for_all,
)
from rowhaul.train.distributed.evaluation import evaluate
from rowhaul.train.distributed.log import ClusterLog
from rowhaul.train.distributed.setup import distribute
from rowhaul.train.distributed.training import DistributedTraining, layout_of
from rowhaul.train.metrics import MetricValues
from rowhaul.train.run import (
    CHECKPOINTS,
    CONFIG_FILE,
    Listener,
    RunResult,
    check_new_folder,
    check_same_config,
    drop_old_checkpoints,
)
from rowhaul.train.trainer import Trainer, check_finite, per_sample_loss, rate_factor
from rowhaul.tuning.hot_set.controller import HotSetController
from rowhaul.tuning.shares import MeasuredLinks, ShareController, first_batches


def train_on_cluster(
    config: TrainConfig,
    schema: Schema | None,
    data: Any,
    *,
    out: str | Path | None = None,
    eval_data: Any = None,
    resume: bool = False,
    listener: Listener | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Train as one rank of a cluster; arguments as of `rowhaul.train.train_run`, the same on every rank.

    With ``data_from: rank0`` only rank 0's schema, data and eval_data count; other ranks may give None.
    """
    if resume and out is None:
        raise ConfigError("resume needs the folder of the run: give out")
    if config.threads:
        torch.set_num_threads(config.threads)
    with join_as_configured(config.cluster) as cluster:
        run = ClusterRun(cluster, config, schema, data, Path(out) if out else None, eval_data, resume)
        try:
            return run.loop(listener if cluster.rank == 0 else None, should_stop)
        finally:
            run.close()


def join_as_configured(settings: ClusterConfig) -> Cluster:
    """Join the other ranks in the roles, and over the interfaces, that a configuration says."""
    return join(
        settings.stores,
        settings.colocated,
        settings.peer_to_peer,
        interface=settings.interface or None,
        side_interface=settings.side_interface or None,
    )


class ClusterRun:
    """A run on one rank: what it trains with, and the loop."""

    def __init__(
        self,
        cluster: Cluster,
        config: TrainConfig,
        schema: Schema | None,
        data: Any,
        folder: Path | None,
        eval_data: Any,
        resume: bool,
    ) -> None:
        schema = schema_for_all(cluster, config, schema)
        self.cluster, self.config, self.schema, self.folder = cluster, config, schema, folder
        if folder and cluster.rank == 0:
            # torchrun repeats one command when it restarts ranks: --resume may find nothing yet.
            begins = not resume or not folder.exists() or not any(folder.iterdir())
            check_new_folder(folder) if begins else check_same_config(folder, config, schema)
        if folder and len(cluster.hosts) > 1:
            instead = "mount one folder (NFS, for instance) on every host, or leave out --out"
            check_shared_folder(cluster, folder.parent, "the run", instead)
        torch.manual_seed(config.seed)
        self.trainer = Trainer(config, schema)
        saved = checkpointing.find(cluster, folder / CHECKPOINTS, self.trainer) if folder and resume else None
        streams = open_streams(cluster, config, schema, data, eval_data, self.trainer.samples)
        self.stream, self.evaluation = streams.training, streams.evaluation
        for one in (self.stream, self.evaluation) if self.evaluation else (self.stream,):
            self.trainer.check_keys(one)
        check_same(cluster, self._facts())
        if saved is not None:
            saved.check_same_data(self.stream)
        self.trainer.total_steps = min(
            self.trainer.step + self.stream.num_batches, config.max_steps or sys.maxsize
        )
        self.first_step = self.trainer.step
        # A worker without samples has nothing to compute, unless layers need all workers at once.
        self.joins_empty = any(isinstance(one, BatchNorm1d) for one in self.trainer.model.modules())
        wanted = config.cluster.links == "measure" or config.cluster.shares == "auto"
        self.links = MeasuredLinks.measure(cluster) if wanted else None
        self.hot = self._hot_set_controller() if config.cluster.hot_is_auto else None
        self.training = self._distribute(saved)
        if folder and cluster.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            config.write(folder / CONFIG_FILE)
            schema.write(folder / SCHEMA_FILE)
        self.log = ClusterLog(
            folder if cluster.rank == 0 else None,
            self.trainer.step,
            cluster.topology,
            config.log_every,
            has_policies=self.trainer.keeper is not None,
        )
        chooses = config.cluster.shares == "auto" and cluster.rank == 0
        self.shares = ShareController(
            self.training,
            lambda: first_batches(self.stream, self.trainer.collection),
            self.links if chooses else None,
            self.log.tell,
        )

    def _facts(self) -> dict[str, str]:
        config = {f"configuration {name}": repr(value) for name, value in self.config.to_dict().items()}
        data = {"data files": self.stream.fingerprint, "schema": repr(self.schema)}
        return {**config, **data, "resumed after step": str(self.trainer.step)}

    def _distribute(self, saved: checkpointing.Saved | None) -> DistributedTraining:
        config, cluster, trainer = self.config, self.cluster, self.trainer
        speeds = self.links.bytes_per_second[: cluster.topology.num_workers] if self.links else None
        settings = schedule_settings(
            config.cluster,
            cluster.topology,
            layout_of(trainer.collection),
            seed=config.seed,
            hot=hot_rows_for_all(cluster, config, self.stream, trainer.collection),
            speeds=speeds,
            policies=trainer.policies,
        )
        if saved is not None and self.links is not None:
            settings = saved.keep_prices(settings)  # measured anew they differ a little, and so would bits
        if self.hot is not None:
            settings = saved.keep_hot(settings) if saved is not None else self.hot.first(settings)

        def rates(iteration: int) -> float:
            return config.rows.lr * rate_factor(config.rates, iteration, trainer.total_steps)

        return distribute(
            cluster,
            trainer.model,
            self.stream,
            settings=settings,
            data_from=config.cluster.data_from,
            rates=rates,
            saved=saved,
            on_iteration=self.iterated,
            on_prune=lambda note: self.log.tell(note.text()),
        )

    def _hot_set_controller(self) -> HotSetController:
        collection, parameters = self.trainer.collection, self.trainer.model.parameters()
        return HotSetController(
            self.cluster,
            self.stream,
            collection,
            layout_of(collection),
            profile=self.config.cluster.hot_profile,
            dense_bytes=sum(one.numel() * one.element_size() for one in parameters),
            links=self.links,
            first=self.first_step,
        )

    def loop(self, listener: Listener | None, should_stop: Callable[[], bool]) -> RunResult:
        """Train to the end, evaluating and saving on the way."""
        trainer, training, total = self.trainer, self.training, self.trainer.total_steps
        training.runtime.should_stop = should_stop
        metrics = None
        if listener:
            whole = self.config.epochs * self.stream.num_samples
            last = trainer.samples + (total - trainer.step) * self.config.batch_size
            listener.started(trainer.samples, min(whole, last))
        with self.log:
            if self.hot is not None:
                self.hot.speak(self.log.tell)
            while trainer.step < total and not training.finished:
                self._train(self._next_pause() - trainer.step, listener)
                if training.runtime.stopped:
                    break
                if trainer.step < total:
                    if self._is_due(self.config.eval_every):
                        metrics = self._evaluate(listener)
                    if self.hot is not None and self._hot_is_due():
                        self.hot.review(training, trainer.samples)
                    if self._is_due(self.config.checkpoint_every):
                        self._save()
            interrupted = training.runtime.stopped and trainer.step < total
            self._save()
            if not interrupted:
                metrics = self._evaluate(listener)
            if sent := data_bytes(training.runtime.feed):
                parts = ", ".join(f"{count:,} of {what}" for what, count in sorted(sent.items()))
                self.log.tell(f"rank 0 has sent data to other ranks, in bytes: {parts}")
        return self._result(metrics, interrupted)

    def close(self) -> None:
        """End the threads of this rank."""
        self.training.close()

    def _train(self, count: int, listener: Listener | None) -> None:
        """A segment of the run."""
        trainer, training = self.trainer, self.training
        self.log.segment_began(trainer.samples)
        for batch in training.batches(count):
            trainer.model.train()
            trainer.set_rates()
            loss = torch.zeros((), dtype=getattr(torch, self.config.precision))
            if len(batch) or self.joins_empty:
                loss = batch.loss(per_sample_loss(trainer.model(batch), batch))
                loss.backward()
            value = training.step(loss)
            assert value is not None
            trainer.dense.step()
            trainer.dense.zero_grad()
            trainer.step += 1
            trainer.samples += batch.global_size
            check_finite(value, trainer.step, self.config)
            self.log.stepped(trainer.step, trainer.samples, value)
            if listener:
                listener.stepped(trainer.samples, value)
        if not self.cluster.is_worker:
            trainer.step = training.iteration
            trainer.samples = training.samples

    def iterated(self, job: Job) -> None:
        """An iteration is over on this worker."""
        self.log.iterated(job)
        self.shares.observe(job)
        if self.hot is not None:
            self.hot.observe(job)

    def _next_pause(self) -> int:
        """The step after which something is to be done, counted from the beginning of the run."""
        step, total = self.trainer.step, self.trainer.total_steps
        every = [one for one in (self.config.eval_every, self.config.checkpoint_every) if one]
        pauses = [total, *((step // one + 1) * one for one in every)]
        if self.hot is not None and self.hot.due is not None:
            pauses.append(self.hot.due)
        return min(pauses)

    def _hot_is_due(self) -> bool:
        """Hot rows are thought over at checkpoints, which then have them, and when their keeper wants to."""
        wanted = self.hot is not None and self.trainer.step == self.hot.due
        return wanted or self._is_due(self.config.checkpoint_every)

    def _is_due(self, every: int) -> bool:
        return bool(every) and self.trainer.step % every == 0

    def _evaluate(self, listener: Listener | None) -> MetricValues | None:
        if self.evaluation is None:
            return None
        if listener:
            listener.evaluating(self.evaluation.num_samples)
        with evaluation_batches(self.training, self.evaluation) as batches:
            metrics = evaluate(self.training, batches)
        if self.cluster.rank == 0:
            self.log.evaluation(self.trainer.step, metrics)
        if listener:
            listener.evaluated(self.trainer.step, metrics)
        return metrics

    def _save(self) -> None:
        if self.folder is None:
            return
        facts = {"samples_per_epoch": self.stream.num_samples, "data": self.stream.fingerprint}
        checkpointing.save(self.cluster, self.training, self.trainer, self.folder / CHECKPOINTS, facts)
        if self.cluster.rank == 0:
            drop_old_checkpoints(self.folder / CHECKPOINTS, self.config.keep_checkpoints)

    def _result(self, metrics: MetricValues | None, interrupted: bool) -> RunResult:
        num_rows, row_bytes = self.training.held()
        return RunResult(
            step=self.trainer.step,
            steps_taken=self.trainer.step - self.first_step,
            samples=self.trainer.samples,
            samples_per_second=self.log.samples_per_second,
            metrics=metrics,
            interrupted=interrupted,
            num_rows=num_rows,
            row_bytes=row_bytes,
            row_counts=self.log.row_counts,
        )
