"""A training run on a cluster: the twin of `rowhaul.train.run` for several ranks.

Every rank runs it. Rank 0 keeps the log and talks to the user; rows are saved by the ranks that
store them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rowhaul._activity import Activity, doing
from rowhaul.checkpoint.location import local_folder
from rowhaul.cluster import Timeouts, join
from rowhaul.cluster.cluster import Cluster
from rowhaul.data.schema import Schema
from rowhaul.data.sources.opening import stream_of
from rowhaul.errors import ConfigError
from rowhaul.monitoring.monitor import NO_MONITOR, Monitor
from rowhaul.train import loop
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed.data_streams import from_reader
from rowhaul.train.distributed.one_machine import train_alone
from rowhaul.train.distributed.session import ClusterSession
from rowhaul.train.fitting import Fit, decisions, with_decisions
from rowhaul.train.run import train_run
from rowhaul.train.run_folder import checkpoints_of
from rowhaul.train.run_lock import RunLock
from rowhaul.train.run_stream import read_by_rank0
from rowhaul.train.session import Listener, RunResult, ShouldStop
from rowhaul.tuning.shares import MeasuredLinks


def train_on_cluster(
    config: TrainConfig,
    schema: Schema | None,
    data: Any,
    *,
    out: str | Path | None = None,
    eval_data: Any = None,
    resume: bool = False,
    listener: Listener | None = None,
    should_stop: ShouldStop = lambda: False,
    monitor: Monitor = NO_MONITOR,
    fit: Fit | None = None,
) -> RunResult:
    """Train as one rank of a cluster; arguments as of `rowhaul.train.train_run`, the same on every rank.

    With ``data_from: rank0`` only rank 0's schema, data and eval_data count; other ranks may give None. With
    ``fit`` a new run takes what rank 0 decides by it where its memory budget leaves something open.
    """
    config.check_ranks()
    if config.stream.follow or (data and stream_of(data, False) is not None):
        config = read_by_rank0(config, data)
    folder = local_folder(out) if out else None
    if resume and checkpoints_of(config, folder) is None:
        raise ConfigError("resume needs to know where the run is: give its folder (out), or its checkpoints")
    if config.threads:
        torch.set_num_threads(config.threads)
    with join_as_configured(config.cluster) as cluster:
        if fit is not None and config.prune.is_used:
            with doing(Activity.READING):
                decided = from_reader(cluster, "deciding how to prune", lambda: decisions(fit(config)))
            config = with_decisions(config, decided)
        listener = listener if cluster.rank == 0 else None
        run = _Run(cluster, config, schema, data, folder, eval_data, monitor, listener, should_stop)
        result, links = run.together(resume)
        first = result.step - result.steps_taken
        while links is not None:
            ended = train_alone(cluster, links, result, should_stop, run.alone)
            result, links = ended.result, None
            if ended.back:
                result, links = run.together(resume=True, may_go_alone=ended.has_room, reason=ended.back)
        return replace(result, steps_taken=result.step - first)


@dataclass(frozen=True)
class _Run:
    """A run on one rank; arguments as of `train_on_cluster`."""

    cluster: Cluster
    config: TrainConfig
    schema: Schema | None
    data: Any
    folder: Path | None
    eval_data: Any
    monitor: Monitor
    listener: Listener | None  # of rank 0
    should_stop: ShouldStop

    def together(
        self, resume: bool, *, may_go_alone: bool = True, reason: str = ""
    ) -> tuple[RunResult, MeasuredLinks | None]:
        """Train with the other ranks; returns also the links, if rank 0 is to go on alone."""
        cluster, config, folder = self.cluster, self.config, self.folder
        with RunLock(folder) if folder and cluster.rank == 0 else nullcontext() as lock:
            session = ClusterSession(
                cluster,
                config,
                self.schema,
                self.data,
                folder,
                self.eval_data,
                resume,
                self.monitor,
                may_go_alone=may_go_alone,
            )
            session.training.runtime.should_stop = self.should_stop
            if session.live is not None:
                session.live.should_stop = self.should_stop
                session.live.on_idle = session.tell_news
            if session.explainer is not None and self.listener is not None:
                session.explainer.show = self.listener.explained
            notes = [f"all ranks train again: {reason}"] if reason else []
            notes += ([lock.note] if lock is not None and lock.note else []) + session.notes
            try:
                result = loop.train(session, checkpoints_of(config, folder), self.listener, notes)
                links = session.shares.links if session.hands_over else None
                faster = session.yardstick.advice()
                return replace(result, inexact=config.cluster.inexact, one_machine=faster), links
            except BaseException as error:  # a second Ctrl-C, too
                cluster.failure.set(error)  # so that closing does not wait for what is stuck
                raise
            finally:
                session.close()

    def alone(self, should_stop: ShouldStop) -> RunResult:
        """Go on in this process, from the last checkpoint."""
        assert self.schema is not None, "rank 0 knows the schema"
        return train_run(
            self.config,
            self.schema,
            self.data,
            out=self.folder,
            eval_data=self.eval_data,
            resume=True,
            listener=self.listener,
            should_stop=should_stop,
            monitor=self.monitor,
            threads=torch.get_num_threads(),  # of all ranks of this host; the settings say those of one
        )


def join_as_configured(settings: ClusterConfig) -> Cluster:
    """Join the other ranks with the roles, interfaces and secret of a configuration."""
    return join(
        settings.stores,
        settings.colocated,
        settings.peer_to_peer,
        interface=settings.interface or None,
        side_interface=settings.side_interface or None,
        secret_file=settings.secret_file or None,
        timeouts=Timeouts(silence=settings.silence, stall=settings.stall_after, stuck=settings.stuck_after),
        stacks=settings.stacks,
    )
