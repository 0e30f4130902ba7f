"""The session of a training run on one rank of a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rowhaul._activity import Activity, doing
from rowhaul.checkpoint import Place
from rowhaul.cluster.checks import check_same, require_all
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.waiting import FOREVER
from rowhaul.data.schema import Schema
from rowhaul.data.sources.live import LiveStream
from rowhaul.data.stream import SampleStream
from rowhaul.explain.explainer import Explainer
from rowhaul.monitoring.monitor import NO_MONITOR, Monitor
from rowhaul.nn import Batch, BatchNorm1d
from rowhaul.runtime.mover import Job
from rowhaul.train.cluster_config import AUTO
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import checkpointing, one_machine
from rowhaul.train.distributed.beside_training import BesideTraining
from rowhaul.train.distributed.checkpoint_places import check_place
from rowhaul.train.distributed.data_streams import (
    evaluation_batches,
    hot_rows_for_all,
    open_streams_for_all,
    reading_rank,
    schema_for_all,
)
from rowhaul.train.distributed.devices import device_of_rank
from rowhaul.train.distributed.evaluation import evaluate
from rowhaul.train.distributed.explaining import explainer_of
from rowhaul.train.distributed.gathering import scores_of_all
from rowhaul.train.distributed.log import ClusterLog, introduce_ranks
from rowhaul.train.distributed.publishing import ClusterPublisher
from rowhaul.train.distributed.resuming import find_saved, fit_to_workers, what_changed
from rowhaul.train.distributed.same_settings import settings_of_all
from rowhaul.train.distributed.setup import distribute, use_given_links
from rowhaul.train.distributed.tables import layout_of, may_stay_home
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.train.distributed.yardstick import Yardstick
from rowhaul.train.metrics import MetricValues
from rowhaul.train.progressive import Scores
from rowhaul.train.ranking import check_grouped
from rowhaul.train.run_data import read_contents
from rowhaul.train.run_folder import begin_folder, check_new_run, checkpoints_of
from rowhaul.train.run_stream import keep_set_aside, open_stream
from rowhaul.train.session import Saved, Session
from rowhaul.train.trainer import Trainer, rate_factor
from rowhaul.transport.dense.overlapping import wire_type
from rowhaul.tuning.hot_set.controller import HotSetController
from rowhaul.tuning.joint_passes import PassesController, fits_passes
from rowhaul.tuning.shares import MeasuredLinks, ShareController, first_batches
from rowhaul.tuning.sum_watch import SumWatch


class ClusterSession(Session):
    """The session of one rank of a cluster; rank 0 leads."""

    log: ClusterLog
    counts_rows = False  # whether plans count rows that stay at home, as they do with --explain

    def __init__(
        self,
        cluster: Cluster,
        config: TrainConfig,
        schema: Schema | None,
        data: Any,
        folder: Path | None,
        eval_data: Any,
        resume: bool,
        monitor: Monitor = NO_MONITOR,
        *,
        may_go_alone: bool = True,
    ) -> None:
        given = config
        config = replace(config, cluster=config.cluster.on_hosts(len(cluster.hosts)))
        schema = schema_for_all(cluster, config, schema)
        self.cluster, self.config, self.schema = cluster, config, schema
        self.is_leader = cluster.rank == 0
        checkpoints = checkpoints_of(config, folder)
        if checkpoints is not None:
            check_place(cluster, checkpoints)
        if not resume and self.is_leader:
            check_new_run(folder, checkpoints)
        torch.manual_seed(config.seed)
        self.trainer = Trainer(config, schema, device_of_rank(cluster, config))
        saved, self.notes = find_saved(cluster, self.trainer, checkpoints, folder) if resume else (None, [])
        if saved is None:  # runs of earlier versions go on
            check_grouped(config.metrics, schema)
        if saved is not None and saved.num_workers not in (None, cluster.topology.num_workers):
            fitting, dropped = fit_to_workers(config.cluster, cluster.topology.num_workers)
            self.config = config = replace(config, cluster=fitting)
            self.notes += dropped
        trainer, reader = self.trainer, saved.reader if saved is not None else None
        self.live: LiveStream | None = None  # where this rank reads a stream for all

        def open_live(given: str) -> LiveStream:
            samples, kinds = trainer.samples, trainer.key_kinds
            self.live = open_stream(config, schema, given, reader, samples, kinds)
            return self.live

        self.stream, self.evaluation = open_streams_for_all(
            cluster, config, schema, data, eval_data, trainer.samples, open_live
        )
        self.trainer.expect(self.stream, self.evaluation)
        check_same(cluster, self._facts())
        keeps_contents = cluster.rank == reading_rank(cluster, config)
        self.contents_folder = folder if keeps_contents else None
        if saved is not None:
            self.first_note = saved.check_same_data(self.stream, config)
        if saved is not None and folder and isinstance(self.stream, SampleStream):
            with doing(Activity.READING):
                read_contents(folder, self.stream, verify=keeps_contents)
        if saved is not None and folder:
            require_all(cluster, "comparing the data with what was read before", FOREVER)
        # A worker without samples has nothing to compute, unless layers need all workers at once.
        self._joins_empty = any(isinstance(one, BatchNorm1d) for one in self.trainer.model.modules())
        tries_shares = config.cluster.shares == "auto" and cluster.topology.num_workers > 1
        wanted = config.cluster.links == "measure" or tries_shares
        self.links = MeasuredLinks.measure(cluster) if wanted else None
        use_given_links(cluster, config.cluster)
        self.hot = self._hot_set_controller() if config.cluster.hot_is_auto else None
        self.training = self._distribute(saved)
        if config.cluster.inexact:
            self.notes.append(f"not exact, by design: {config.cluster.inexact}")
        self.saving = BesideTraining(cluster)
        if folder and self.is_leader:
            begin_folder(folder, given, schema, data, eval_data)
        self.publisher: ClusterPublisher | None = None
        if config.publish.is_used:
            self.publisher = ClusterPublisher(cluster, self.training, self.trainer, folder, reader)
            self.more_facts = self.publisher.facts
        if saved is not None and self.is_leader:
            saved.chosen.set_damaged_aside()
        self.log = ClusterLog(
            folder if self.is_leader else None,
            self.trainer.step,
            cluster.topology,
            config.log_every,
            has_policies=self.trainer.lifecycle is not None,
            monitor=monitor,
        )
        if saved is not None and (differences := saved.differences(self.training.settings)):
            self.notes.append(what_changed(differences))
        if self.is_leader:
            introduce_ranks(monitor, cluster, self.training, self.trainer)
        self.explainer: Explainer | None = None
        if config.monitoring.explain:
            self.explainer = explainer_of(cluster, self.training, self.trainer, folder)
        self.shares = ShareController(
            self.training,
            lambda: first_batches(self.stream, self.trainer.collection),
            self.links if tries_shares else None,
            self.log.tell,
            decides=self.is_leader,
            shared_links=cluster.interface == cluster.side_interface,
        )
        if self.hot is not None and tries_shares:  # one trial at a time
            self.hot.is_disturbed = self.shares.is_trying
            self.shares.is_disturbed = lambda: self.hot is not None and self.hot.is_trying
        # Workers of one host sum in its memory.
        use_links = sum(min(host) < cluster.topology.num_workers for host in cluster.hosts) > 1
        self.sums = SumWatch(self.training, self.log.tell) if use_links and not tries_shares else None
        self.shares.may_go_alone = self._lends_threads = (
            tries_shares and may_go_alone and checkpoints is not None and one_machine.is_possible(config)
        )
        self.shares.shares_cores = len(cluster.local_ranks) > 1
        self.yardstick = Yardstick(cluster, config, self.log)
        self.passes: PassesController | None = None
        if cluster.rank == 0 and fits_passes(config.cluster.dispatcher):
            self.passes = PassesController(self.training.runtime.postbox.post, cluster.topology.num_workers)

    def publish_beside(self, done: Saved, *, waits: bool) -> bool:
        """Publish what changed beside training, with the other ranks."""
        assert self.publisher is not None
        for trouble in self.publisher.troubles():
            self.tell(trouble)
        return self.publisher.publish_beside(self._event_time, done, waits=waits)

    def publish_last(self, done: Saved) -> None:
        """Publish the model at the end, with the other ranks, unless it is published."""
        assert self.publisher is not None
        self.publisher.publish_last(self._event_time, done)

    @property
    def _event_time(self) -> float | None:
        return self.live.event_time if self.live is not None else None

    def _is_publishing_due(self) -> bool:
        """Whether the clock asks for a version, and nothing is being written; asked on rank 0."""
        publisher = self.publisher
        return publisher is not None and publisher.is_free and self.should_publish()

    def _facts(self) -> dict[str, str]:
        data = {"data files": self.stream.fingerprint, "schema": repr(self.schema)}
        return {**settings_of_all(self.config), **data, "resumed after step": str(self.trainer.step)}

    def _distribute(self, saved: checkpointing.Saved | None) -> DistributedTraining:
        config, cluster, trainer = self.config, self.cluster, self.trainer
        speeds = self.links.bytes_per_second[: cluster.topology.num_workers] if self.links else None
        layout, stays = layout_of(trainer.collection), may_stay_home(trainer.collection)
        settings = layout.schedule_settings(
            config.cluster,
            cluster.topology,
            seed=config.seed,
            hot=hot_rows_for_all(cluster, config, self.stream, trainer.collection),
            speeds=speeds,
            policies=trainer.policies,
            may_stay_home=stays,
        )
        if saved is not None and self.links is not None:
            settings = saved.keep_prices(settings)  # measured anew they differ a little, and so would bits
        if saved is not None and config.cluster.sync == AUTO:
            settings = saved.keep_sync(settings, may_stay_home=stays)
        if saved is not None and (self.hot is not None or not layout.keeps_hot_rows):
            settings = saved.keep_hot(settings)
        elif self.hot is not None:
            settings = self.hot.first(settings)

        def rates(iteration: int) -> float:
            return config.rows.lr * rate_factor(config.rates, iteration, trainer.total_steps)

        return distribute(
            cluster,
            trainer.model,
            self.stream,
            config.cluster,
            settings=settings,
            data_from=config.cluster.data_from,
            rates=rates,
            saved=saved,
            on_iteration=self.iterated,
            on_prune=lambda note: self.log.tell(note.text()),
            on_left_out=lambda note: self.log.tell(note),
            optimizer=trainer.dense,
            compare_every=config.cluster.compare_every,
            dense_wire=config.cluster.dense_wire,
            counts_rows=self.counts_rows or config.monitoring.explain,
        )

    def _hot_set_controller(self) -> HotSetController:
        collection, parameters = self.trainer.collection, self.trainer.model.parameters()
        wire = wire_type(self.config.cluster.dense_wire)
        return HotSetController(
            self.cluster,
            self.stream,
            collection,
            layout_of(collection),
            profile=self.config.cluster.hot_profile,
            dense_bytes=sum(one.numel() * (wire or one.dtype).itemsize for one in parameters),
            links=self.links,
            first=self.trainer.step,
        )

    def start(self) -> None:
        """Let the hot set's controller tell what it decides, and give the runtime the clock of saves."""
        if self.hot is not None:
            self.hot.report_to(self.tell)  # on the terminal, too
        self.training.runtime.should_save = self.should_save
        self.training.runtime.should_publish = self._is_publishing_due
        self.training.runtime.should_rest = (self.sums or self.shares).wants_review

    def batches(self, count: int) -> Iterator[Batch]:
        """Yield this worker's part of the next global batches; nothing on a store, which serves them."""
        self.shares.resume()
        yield from self.training.batches(count)
        runtime = self.training.runtime
        self.stopped, self.save_due, self.finished = runtime.stopped, runtime.save_due, runtime.ended
        self.publish_due = runtime.publish_due
        if not self.cluster.is_worker:
            self.trainer.step, self.trainer.samples = self.training.iteration, self.training.samples
            self.log.monitor.reach(self.trainer.step, self.trainer.samples)

    def train(self, batch: Batch) -> float:
        """Take one step with the other ranks; a worker that is left out does not know the loss."""
        joins = self._joins_empty and self.training.is_summing
        parts = [batch] if len(batch) or joins else []
        # One machine is tried with the threads that it would have alone, and keeps them where it stays.
        is_alone = self._lends_threads and len(batch) == batch.global_size
        with one_machine.threads_of_host(self.cluster) if is_alone else nullcontext():
            loss = self.trainer.learn(parts, batch.global_size, self._step_rows)
        if self.live is not None:
            self.live.reached(self.trainer.samples)
            self.tell_news()
            keep_set_aside(self.contents_folder, self.live)
        return loss

    def tell_news(self) -> None:
        """Tell what happened in a stream that this rank reads, such as why nothing comes; in any thread."""
        for note in self.live.news() if self.live is not None else ():
            self.tell(note)

    def _step_rows(self, loss: Tensor) -> float:
        value = self.training.step(loss)
        return math.nan if value is None else value

    def pauses(self) -> list[int]:
        """The step at which hot rows are to be reviewed, if one is set."""
        return [self.hot.due] if self.hot is not None and self.hot.due is not None else []

    def rest(self, at_checkpoint: bool) -> None:
        """Review hot rows at checkpoints, which then have them, and when their controller asks for it.

        Shares, or else the way to sum, are reviewed when that is asked for.
        """
        if self.training.runtime.rest_due and self.shares.may_go_alone:
            self.hands_over = one_machine.is_chosen(self.cluster, self.training, self.shares, self.tell)
            if self.hands_over:
                return
        if self.training.runtime.rest_due and self.sums is not None:
            self.sums.review()
        elif self.training.runtime.rest_due:
            self.shares.review(self.cluster.control)
        if self.hot is not None and (at_checkpoint or self.trainer.step == self.hot.due):
            self.hot.review(self.training, self.trainer.samples)

    def evaluate(self) -> MetricValues:
        """Measure the model on the evaluation data, with the other ranks."""
        assert self.evaluation is not None
        with doing(Activity.EVALUATING), evaluation_batches(self.training, self.evaluation) as batches:
            return evaluate(self.training, batches, metrics=self.trainer.new_metrics())

    def gather_scores(self, mine: Scores) -> Scores:
        """Gather the scores of all workers on rank 0."""
        return scores_of_all(self.training.runtime, self.cluster.topology.num_workers, mine)

    def save(self, checkpoints: Place, facts: dict[str, Any]) -> None:
        """Save a checkpoint of this step, with the other ranks."""
        with doing(Activity.SAVING):
            self.saving.finish()
            # Rank 0 may still be removing old checkpoints.
            require_all(self.cluster, "finishing a checkpoint", FOREVER)
            checkpointing.save(self.cluster, self.training, self.trainer, checkpoints, facts)

    def save_beside(self, checkpoints: Place, facts: dict[str, Any], done: Saved, *, waits: bool) -> bool:
        """Save a checkpoint of this step beside training, with the other ranks."""
        with doing(Activity.SAVING):
            if waits:
                self.saving.finish()
            return checkpointing.save_beside(
                self.cluster, self.training, self.trainer, checkpoints, facts, self.saving, done
            )

    def held(self) -> tuple[int, int]:
        """Count the rows of the model, and bytes on all ranks."""
        return self.training.held()

    def iterated(self, job: Job) -> None:
        """Observe an iteration that is over on this worker."""
        self.log.iterated(job)
        self.yardstick.observe(job)
        if news := self.yardstick.news():
            self.tell(f"one machine: {news}")
        if self.explainer is not None:
            self.explainer.iterated(job)
        self.shares.observe(job)
        if self.sums is not None:
            self.sums.observe(job)
        if self.passes is not None:
            self.passes.observe(job.measures)
        if self.hot is not None:
            self.hot.observe(job)

    def finish(self) -> None:
        """Compare the workers' models a last time; log what rank 0 has sent of the data."""
        if self.explainer is not None:
            self.explainer.finish()
        self.training.compare_replicas()
        if sent := self.training.runtime.feed.data_bytes:
            parts = ", ".join(f"{count:,} of {what}" for what, count in sorted(sent.items()))
            self.log.tell(f"rank 0 has sent data to other ranks, in bytes: {parts}")

    def close(self) -> None:
        """End the threads of this rank."""
        self.saving.close()
        if self.publisher is not None:
            self.publisher.close()
        self.training.close()
        if self.live is not None:
            self.live.source.close()
        if self.explainer is not None:
            self.explainer.close()
