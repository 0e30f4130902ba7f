"""`ClusterPublisher`: publishes what a cluster learns, a base first and then what changed, beside training.

Rank 0's clock says when; all ranks stop at the same step, copy the changed rows of which they have the latest
record, and train on. Each writes its rows to a file of the delta; rank 0 adds the dense weights, and
publishes it once all are there.

A run that resumes has forgotten what it learned after its checkpoint, but readers have not: before it trains
on, rank 0 publishes in which rows the checkpoint differs from the newest version.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rowhaul._activity import Activity, doing
from rowhaul.checkpoint import CheckpointReader
from rowhaul.cluster.checks import check_shared_folder, gather_texts, require_all
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.rendezvous import Store
from rowhaul.cluster.waiting import FOREVER, ranks_text
from rowhaul.errors import CheckpointError
from rowhaul.store.row_format import format_of
from rowhaul.store.whole_rows import WholeRows
from rowhaul.train.distributed.beside_training import BesideTraining
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.train.run_folder import PUBLISHED_BY
from rowhaul.train.save_thread import Pacer, SaveCancelledError, SaveThread
from rowhaul.train.session import Saved
from rowhaul.train.trainer import Trainer, make_model

if TYPE_CHECKING:
    from rowhaul.publishing.changed_rows import Changes
    from rowhaul.publishing.folder import PublishedFolder, State


class ClusterPublisher:
    """Publishes a run on one rank of a cluster; all ranks make one, and call it together.

    Args:
        cluster: of this rank.
        training: at its first step, or restored.
        trainer: its model.
        folder: of the run, if it has one.
        reader: of the checkpoint that the run resumes from.

    Raises:
        ConfigError: on every rank alike, what cannot be published; on rank 0 a folder of another run.
    """

    def __init__(
        self,
        cluster: Cluster,
        training: DistributedTraining,
        trainer: Trainer,
        folder: Path | None,
        reader: CheckpointReader | None,
    ) -> None:
        from rowhaul.export.serving.folder import check_servable, unknown_ids  # it takes a while to import

        self._cluster, self._training, self._trainer = cluster, training, trainer
        self._path = trainer.config.publish.path.absolute()
        check_servable(trainer)
        if len(cluster.hosts) > 1:
            instead = "mount one folder (NFS, for instance) on every host"
            check_shared_folder(cluster, str(self._path.parent), "what is published", instead)
        training.track_changes()
        format = format_of(training.layout)
        assert isinstance(format, WholeRows)  # others are refused by the configuration
        self._format, self._unknown = format, unknown_ids(trainer)
        self._tables = {one.name: (one.dim, training.layout.dtype) for one in training.layout.specs}
        self._since = trainer.step  # changes up to this step are published
        self._writing = BesideTraining(cluster, nice=0)  # servers wait for what it writes
        self._compacting, self._trouble = SaveThread(), ""
        self._folder: PublishedFolder | None = None
        self.facts: dict[str, Any] = {}
        if cluster.rank == 0:
            with doing(Activity.SAVING):
                self._folder = self._begin(folder, reader)
        require_all(cluster, "publishing the model", FOREVER)

    def _begin(self, run_folder: Path | None, reader: CheckpointReader | None) -> PublishedFolder:
        """Publish what the run knows, on rank 0."""
        from rowhaul.publishing.changed_rows import served
        from rowhaul.publishing.folder import PublishedFolder
        from rowhaul.publishing.from_checkpoint import publish_checkpoint
        from rowhaul.publishing.graphs import GraphWriter
        from rowhaul.publishing.publisher import check_folder, run_name, uncounted

        trainer, settings = self._trainer, self._trainer.config.publish
        check_folder(self._path, run_folder, reader)
        run = run_name(run_folder, reader)
        self.facts = {PUBLISHED_BY: run}
        with torch.random.fork_rng(devices=[]):
            model = make_model(replace(trainer.config, device="cpu", device_memory=""), trainer.schema)
            graphs = GraphWriter.exported(model, settings.kinds)
        folder = PublishedFolder(self._path, run, trainer, graphs)
        if reader is not None:
            publish_checkpoint(reader, self._tables, folder)
        else:
            nothing = served(self._format, {}, self._tables, lambda: None)
            folder.write_base(nothing, self._state(None), uncounted())
        return folder

    @property
    def is_free(self) -> bool:
        """Whether this rank writes no delta."""
        return not self._writing.is_busy

    def publish_beside(self, event_time: float | None, done: Saved, *, waits: bool = False) -> bool:
        """Publish what changed, while training goes on; return whether that has begun. A collective call.

        ``done`` is called in another thread when it is published, or has failed; what changed is in the next
        one then.
        """
        from rowhaul.train.distributed.changed_rows import take_changed_rows

        if waits:
            self._writing.finish()
        name = ""

        def begin() -> bool:
            nonlocal name
            assert self._folder is not None
            try:
                name, _ = self._folder.begin_delta()
            except OSError as error:
                raise CheckpointError(f"rank 0 cannot write to {self._path}: {error}") from error
            return True

        try:
            if not self._writing.all_begin(self._training, begin):
                return False
        except CheckpointError as error:
            done(error)
            return True
        name = self._name_for_all(name)
        changes = take_changed_rows(self._training, self._since)
        state = self._state(event_time) if self._cluster.rank == 0 else None
        self._writing.start(partial(self._write, name, changes, state, self._trainer.step), done)
        return True

    def publish_last(self, event_time: float | None, done: Saved) -> None:
        """Publish the end of the run, unless it is published, and wait until it can be read; collective."""
        self._writing.finish()
        if self._since != self._trainer.step:
            self.publish_beside(event_time, done, waits=True)
            self._writing.finish()
        self._compacting.finish()

    def troubles(self) -> list[str]:
        """Return what kept the base from being renewed, since the last call."""
        found, self._trouble = self._trouble, ""
        return [f"the published base cannot be renewed: {found}"] if found else []

    def close(self) -> None:
        """End what is being written; nothing of it is seen."""
        self._writing.close()
        self._compacting.close()

    def _state(self, event_time: float | None) -> State:
        from rowhaul.publishing.publisher import state_of

        return state_of(self._trainer, event_time)

    def _name_for_all(self, name: str) -> str:
        """Tell all ranks which folder rank 0 has made."""
        mine = np.frombuffer(name.ljust(32).encode(), np.uint8)
        every = self._training.runtime.in_control(lambda control: control.all_gather(mine)).wait()
        return bytes(every[0]).decode().strip()

    def _write(
        self, name: str, changes: Changes, state: State | None, step: int, store: Store, pacer: Pacer
    ) -> None:
        """Write this rank's rows, wait for the others, publish all."""
        pacer.hurry()
        meet = partial(gather_texts, self._cluster, seconds=FOREVER, store=store, check=pacer)
        mine = json.dumps(self._write_part(self._path / name, changes, step, pacer))
        parts = [json.loads(text) for text in meet("writing a version", mine)]
        trouble = self._complete(name, parts, state) if state is not None else ""
        trouble = meet("publishing a version", trouble)[0]
        if trouble:
            raise CheckpointError(trouble)
        assert self._training.runtime.mover.changes is not None
        self._since = step
        self._training.runtime.mover.changes.forget(step)
        if self._cluster.rank == 0:
            self._compact_if_due()

    def _write_part(self, folder: Path, changes: Changes, step: int, pacer: Pacer) -> dict[str, Any]:
        """Write this rank's rows; returns the entry of the file, or the error: the others must not wait."""
        from rowhaul.publishing.changed_rows import served
        from rowhaul.publishing.folder import write_part

        try:
            rows = served(self._format, changes, self._tables, pacer)
            return write_part(folder, f"r{self._cluster.rank:04d}", rows, self._unknown, step)
        except SaveCancelledError:
            raise
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _complete(self, name: str, parts: list[dict[str, Any]], state: State) -> str:
        """Publish a delta whose rows are written, on rank 0; returns what is wrong otherwise."""
        assert self._folder is not None
        for rank, part in enumerate(parts):
            if "error" in part:
                who = ranks_text([rank], self._cluster.roles)
                return f"{who} could not write its rows: {part['error']}"
        try:
            self._folder.end_delta(name, parts, state)
        except Exception as error:  # the others wait for an answer
            return f"{type(error).__name__}: {error}"
        return ""

    def _compact_if_due(self) -> None:
        from rowhaul.publishing import compaction

        folder = self._folder
        assert folder is not None
        most = self._trainer.config.publish.compact_after
        if not self._compacting.is_busy and compaction.is_due(folder, most):
            self._compacting.start(lambda pacer: compaction.compact(folder, pacer), self._compacted)

    def _compacted(self, error: Exception | None) -> None:
        self._trouble = "" if error is None else str(error)
