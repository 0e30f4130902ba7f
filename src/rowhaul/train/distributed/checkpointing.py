"""Checkpoints of a cluster: every rank writes what it holds, and all ranks resume from it together.

The rows are written flushed and by key, by the ranks that have their latest records (see `cluster_rows`), as
one process writes them. Beside them is what the same cluster needs to continue with the same bits (see
`sidecar`), and the state of its scheduler. Another cluster, or one process, ignores that and has the same
model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rowhaul.checkpoint import MANIFEST_FILE, CheckpointReader, Place, as_place
from rowhaul.checkpoint.choosing import Chosen, newest_intact
from rowhaul.checkpoint.layout import finished_checkpoints, step_folder
from rowhaul.checkpoint.location import storage_of
from rowhaul.checkpoint.writer import discard, prepare
from rowhaul.cluster.checks import BEGINNING_SECONDS, gather_texts, wait_until_all_know
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.rendezvous import Store
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError, ClusterError, ConfigError
from rowhaul.planning.disagreement import DisagreementError
from rowhaul.runtime.layout import TableLayout
from rowhaul.schedule import HotRows, Scheduler, ScheduleSettings
from rowhaul.schedule.arrays import named
from rowhaul.schedule.settings import differences
from rowhaul.store.row_format import format_of
from rowhaul.train import saved_lifetimes, snapshot
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import sidecar
from rowhaul.train.distributed.beside_training import BesideTraining
from rowhaul.train.distributed.checkpoint_places import damage_seen_by_all
from rowhaul.train.distributed.cluster_rows import SCHEDULE, ClusterRows, cluster_rows
from rowhaul.train.distributed.cluster_snapshot import HOT, LIFETIMES, ClusterSnapshot, table_names
from rowhaul.train.distributed.setup import Start
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.train.run_data import check_same_data
from rowhaul.train.save_thread import Pacer
from rowhaul.train.snapshot import Trained

_PRESENT_SECONDS = 30.0  # in which all ranks must have called


def save(
    cluster: Cluster,
    training: DistributedTraining,
    trainer: Trained,
    checkpoints: str | Place,
    facts: Mapping[str, Any] | None = None,
) -> Place:
    """Write a checkpoint to a URL, or into a folder that all ranks share; returns where it is.

    A collective call, between two segments, by stores, too: where ranks are missing, the others raise an
    error that names them. Where the models of two workers differ, all raise an error, and nothing is written.
    If one rank cannot write its part, all raise an error that says so, and there is no checkpoint. An
    existing one of the same step stays as it is.
    """
    path = as_place(checkpoints) / step_folder(trainer.step)
    if _all_begin(cluster, path, trainer.step):
        _compare_replicas(cluster, training, trainer, path)
        taken = ClusterSnapshot(cluster, training, trainer, facts, beside=False)
        try:
            taken.write(path, cluster.store)
        finally:
            taken.close()
    return path


def save_beside(
    cluster: Cluster,
    training: DistributedTraining,
    trainer: Trained,
    checkpoints: str | Place,
    facts: Mapping[str, Any],
    saving: BesideTraining,
    done: Callable[[Exception | None], None] = lambda error: None,
) -> bool:
    """Write a checkpoint while training goes on; the same as `save` writes. Return whether it has begun.

    A collective call, between two segments. Nothing is done where a rank still writes the one before, or
    where there is one of this step. If rank 0 cannot begin, it raises an error, and the others go on.
    ``done`` is called on every rank, in another thread, when it is complete; or with the error, if a rank
    could not write its part: then there is no checkpoint.
    """
    path = as_place(checkpoints) / step_folder(trainer.step)
    if not saving.all_begin(training, partial(_begin, path)):
        return False
    _compare_replicas(cluster, training, trainer, path)
    taken = ClusterSnapshot(cluster, training, trainer, facts, beside=True)

    def write(store: Store, pacer: Pacer) -> None:
        pacer.hurry_when(taken.is_crowded)
        try:
            taken.write(path, store, pacer)
        finally:
            taken.close()

    saving.start(write, done)
    return True


def _compare_replicas(cluster: Cluster, training: DistributedTraining, trainer: Trained, path: Place) -> None:
    """Refuse to save models that differ between workers; those that were left out catch up before."""
    training.catch_up()
    try:
        training.compare_replicas(trainer.dense)
    except DisagreementError:
        if cluster.rank == 0:
            discard(path)
        raise


def find(cluster: Cluster, checkpoints: str | Place, trainer: Trained) -> Saved | None:
    """Load the newest intact checkpoint of a folder or URL into a trainer, all but the rows.

    A collective call: all ranks take the same one, of those that rank 0 sees. None where there is none yet.
    Every rank compares a part of the files with their checksums before one is chosen; a damaged checkpoint is
    passed over by all. A checkpoint of another model is refused before anything changes.
    """
    place = as_place(checkpoints)
    names = [one.name for one in finished_checkpoints(place)] if cluster.rank == 0 else []
    names = json.loads(gather_texts(cluster, "resume", json.dumps(names), BEGINNING_SECONDS)[0])
    chosen = newest_intact([place / name for name in names], partial(damage_seen_by_all, cluster))
    if chosen is None:
        return None
    reader = CheckpointReader(chosen.path)
    snapshot.restore_dense(trainer, reader)
    rows = cluster_rows(format_of(trainer.collection.row_settings), table_names(trainer))
    return Saved(cluster, reader, rows, chosen)


class Saved:
    """A checkpoint that a cluster resumes from.

    Args:
        cluster: that resumes, which need not be like the one that saved.
        reader: of the checkpoint.
        rows: what loads the rows of the model's tables.
        chosen: how it was chosen.
    """

    def __init__(self, cluster: Cluster, reader: CheckpointReader, rows: ClusterRows, chosen: Chosen) -> None:
        self._cluster, self._reader, self._rows, self.chosen = cluster, reader, rows, chosen
        self.reader = reader
        self._written: dict[str, Any] | None = reader.facts.get("cluster")
        if self._written is not None and len(self._written["threads"]) == cluster.num_ranks:
            torch.set_num_threads(self._written["threads"][cluster.rank])  # another number sums differently

    @property
    def start(self) -> Start:
        """Where `distribute` is to begin."""
        next_record = self._written["next_record"] if self._written is not None else 0
        return Start(self._reader.facts["step"], next_record, self._bring_scheduler)

    @property
    def num_workers(self) -> int | None:
        """Workers of the cluster that saved; None where one process did."""
        return None if self._written is None else int(self._written["settings"]["num_workers"])

    @property
    def samples(self) -> int:
        """Samples trained so far: where the data continues."""
        return int(self._reader.facts["samples"])

    def differences(self, settings: ScheduleSettings) -> list[str]:
        """Say what keeps the run from continuing with the same bits; the model is equal but for rounding."""
        if self._written is None:
            return ["it was saved without caches and schedule, by one process or as a state dict"]
        return differences(settings.describe(), self._written["settings"])

    def keep_prices(self, settings: ScheduleSettings) -> ScheduleSettings:
        """The settings with the link prices of the checkpoint, if it has as many: new measurements differ."""
        prices = tuple(self._written["prices"]) if self._written is not None else ()
        return replace(settings, prices=prices) if len(prices) == len(settings.prices) else settings

    def keep_sync(self, settings: ScheduleSettings, *, may_stay_home: bool) -> ScheduleSettings:
        """The settings with the checkpoint's way to synchronise rows, if the same bits follow from it.

        Rows that may not stay at home, such as those of a model that is on a card now, move by plans.
        """
        if self._written is None:
            return settings
        try:
            kept = replace(settings, sync=self._written["settings"]["sync"])
        except ConfigError:
            return settings
        can_be_kept = may_stay_home or kept.sync_mode.plans_rows
        return kept if can_be_kept and not self.differences(kept) else settings

    def layout(self, layout: TableLayout) -> TableLayout:
        """The tables as the checkpoint has them."""
        return self._rows.saved_layout(self._reader, layout)

    def keep_hot(self, settings: ScheduleSettings) -> ScheduleSettings:
        """The settings with the replicated rows of the checkpoint: where a model chose them, they stay."""
        num_hot = self._written.get("num_hot", 0) if self._written is not None else 0
        if not num_hot:
            return replace(settings, hot=None)
        rows = self._reader.arrays(f"{HOT}.safetensors")
        return replace(settings, hot=HotRows(rows["tables"], rows["keys"]))

    def check_same_data(self, stream: SampleStream, config: TrainConfig | None = None) -> str:
        """Refuse other files than those trained on; returns a note on files added at the end.

        A stream was opened at the checkpoint's position, which rank 0 has compared.
        """
        return "" if stream.is_live else check_same_data(self._reader, stream, config)

    def load_rows(self, training: DistributedTraining) -> None:
        """Fill this rank's store and cache; every rank does it, after `distribute` and before training."""
        if self.differences(training.settings):
            self._rows.load(self._reader, training, None)
            return
        assert self._written is not None
        mine, mover = self._written["files"][self._cluster.rank], training.runtime.mover
        self._rows.load(self._reader, training, set(mine))
        sidecars = [name for name in mine if name.startswith(sidecar.PREFIX)]
        sidecar.read(self._reader, sidecars, mover.cache, mover.home)

    def _bring_scheduler(self, scheduler: Scheduler) -> None:
        known = saved_lifetimes.read(self._reader, self._rows.tables)
        if not self.differences(scheduler.settings):
            state = self._reader.arrays(f"{SCHEDULE}.safetensors")
            apart = self._rows.scheduler_state(self._reader)
            scheduler.restore({**state, **named(LIFETIMES, known or {}), **apart})
            self._rows.restore_scheduler(scheduler, self._reader)
            return
        start = self.start
        scheduler.go_on_at(start.iteration, start.next_record)
        if known is not None:
            scheduler.recall(known)
        self._rows.start_scheduler(scheduler, self._reader)


def _all_begin(cluster: Cluster, path: Place, step: int) -> bool:
    """Whether there is something to write; false on all ranks where the checkpoint is there already."""
    is_there, trouble = False, ""
    if cluster.rank == 0:
        try:
            is_there = not _begin(path)
        except CheckpointError as error:
            trouble = str(error)
    text = json.dumps({"step": step, "is_there": is_there, "trouble": trouble})
    said = [json.loads(one) for one in gather_texts(cluster, "save", text, _PRESENT_SECONDS)]
    steps = [one["step"] for one in said]
    if len(set(steps)) > 1 or said[0]["trouble"]:
        wait_until_all_know(cluster)
    if len(set(steps)) > 1:
        raise ClusterError(
            f"ranks save different steps: {steps} (by rank). Saving is collective: every rank, stores too, "
            "must call it after the same step"
        )
    if said[0]["trouble"]:
        raise CheckpointError(said[0]["trouble"])
    return not said[0]["is_there"]


def _begin(path: Place) -> bool:
    """Make room for a checkpoint, on rank 0; false where it is there already."""
    try:
        if storage_of(path).is_file(path / MANIFEST_FILE):
            return False
        prepare(path)
    except OSError as error:
        raise CheckpointError(f"rank 0 cannot write to {path.parent}: {error}") from error
    return True
