"""`Publisher`: publishes what one process learns, a base first and then what changed, beside training.

A delta is taken while training pauses: the rows that changed since the last one that was published are
copied, and nothing else is looked at. It is written, and the base renewed now and then, in threads that
give way to training.

A run that resumes has forgotten what it learned after its checkpoint, but readers have not; nor does it know
which rows had changed before the checkpoint without being published. So its first delta also has every row
in which the newest version differs from the checkpoint, and base and deltas are again what the run knows.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rowhaul._files import write_text
from rowhaul.checkpoint import CheckpointReader
from rowhaul.checkpoint.progress import Counter
from rowhaul.errors import CheckpointError
from rowhaul.export.serving.folder import check_servable
from rowhaul.nn.local_rows import LocalRows
from rowhaul.publishing import compaction
from rowhaul.publishing.changed_rows import Changes, changed_rows, served
from rowhaul.publishing.difference import can_follow, difference, newest_rows
from rowhaul.publishing.folder import PublishedFolder, State, existing
from rowhaul.publishing.graphs import GraphWriter
from rowhaul.serve.deltas import Moment
from rowhaul.store.row_format import format_of
from rowhaul.store.served_rows import ServedRows
from rowhaul.store.whole_rows import WholeRows
from rowhaul.train.run_folder import PUBLISH_FILE, PUBLISHED_BY
from rowhaul.train.save_thread import Pacer, SaveThread
from rowhaul.train.trainer import Trainer, make_model

Done = Callable[[Exception | None], None]


@dataclass(frozen=True)
class Taken:
    """What a delta will consist of."""

    changes: Changes
    state: State


class Publisher:
    """Publishes a run of one process.

    Args:
        trainer: at its first step, or restored.
        run: what `run_name` returned.
        reader: of the checkpoint that the run resumes from.

    Raises:
        ConfigError: the folder is not this run's.
    """

    def __init__(self, trainer: Trainer, run: str, reader: CheckpointReader | None) -> None:
        settings, self._trainer, self._run = trainer.config.publish, trainer, run
        self.taken_step = trainer.step  # of the last delta
        check_servable(trainer)
        format = format_of(trainer.collection.row_settings)
        assert isinstance(format, WholeRows)
        self._format = format
        source = trainer.collection.source
        assert isinstance(source, LocalRows)  # others are refused by the configuration
        self._source, self._changed = source, source.track_changes()
        model = make_model(replace(trainer.config, device="cpu", device_memory=""), trainer.schema)
        self._folder = PublishedFolder(
            settings.path, run, trainer, GraphWriter.exported(model, settings.kinds)
        )
        configs = trainer.collection.table_configs()
        self._tables = {
            one.name: (one.embedding_dim, str(one.data_type).removeprefix("torch.")) for one in configs
        }
        self._since = trainer.step  # changes up to this step are published
        self._writing = SaveThread(nice=0)  # servers wait for what it writes
        self._compacting = SaveThread()
        self._trouble: Exception | None = None  # of a compaction
        self._can_follow = True  # what was published before
        self._current = self._continue(reader)  # whether the newest version is what the run knows
        if self._folder.published is None or not self._can_follow:
            self._folder.write_base(self._all_rows(reader), state_of(trainer, None), uncounted())
            self._current = True

    @property
    def facts(self) -> dict[str, Any]:
        """What checkpoints of the run say, so that it goes on with the folder when it resumes."""
        return {PUBLISHED_BY: self._run}

    @property
    def is_free(self) -> bool:
        """Whether no delta is being written."""
        return not self._writing.is_busy

    @property
    def is_current(self) -> bool:
        """Whether the newest version is what the run knows."""
        return self._current and self._since == self._trainer.step

    def publish_beside(self, event_time: float | None, done: Done, *, waits: bool = False) -> bool:
        """Publish what changed, while training goes on; return whether that has begun.

        Nothing is done while the delta before is being written, unless told to wait for that. ``done`` is
        called in another thread when it is published, or has failed; what changed is in the next one then.
        """
        if waits:
            self._writing.finish()
        if self._writing.is_busy:
            return False
        taken, self.taken_step = self._take(event_time), self._trainer.step

        def write(pacer: Pacer) -> None:
            self._write(taken, pacer)

        self._writing.start(write, done)
        return True

    def finish(self) -> None:
        """Wait for what is being written."""
        self._writing.finish()
        self._compacting.finish()

    def close(self) -> None:
        """End what is being written; nothing of it is seen."""
        self._writing.close()
        self._compacting.close()

    def troubles(self) -> list[str]:
        """Return what kept the base from being renewed, since the last call."""
        found, self._trouble = self._trouble, None
        return [] if found is None else [f"the published base cannot be renewed: {found}"]

    def _take(self, event_time: float | None) -> Taken:
        names = self._source.table_names()
        changed = self._changed.seal().since(self._since)
        found = changed_rows(self._source, ((names[table], keys) for table, keys in changed))
        return Taken(found, state_of(self._trainer, event_time))

    def _write(self, taken: Taken, pacer: Pacer) -> None:
        """Write a delta, as fast as it goes: readers wait for it."""
        pacer.hurry()
        name, folder = self._folder.begin_delta()
        state = replace(taken.state, moment=replace(taken.state.moment, published_at=time.time()))
        rows = served(self._format, taken.changes, self._tables, pacer)
        part = self._folder.write_part(folder, "r0000", rows, state.moment.step)
        self._folder.end_delta(name, [part], state)
        self._since, self._current = state.moment.step, True
        self._changed.forget(self._since)
        self._compact_if_due()

    def _compact_if_due(self) -> None:
        most = self._trainer.config.publish.compact_after
        if not self._compacting.is_busy and compaction.is_due(self._folder, most):
            self._compacting.start(lambda pacer: compaction.compact(self._folder, pacer), self._compacted)

    def _compacted(self, error: Exception | None) -> None:
        self._trouble = error

    def _continue(self, reader: CheckpointReader | None) -> bool:
        """Go on after what this run has published before; returns whether that is what it knows."""
        if self._folder.published is None:
            return False
        try:
            base, overlay = newest_rows(self._folder)
        except CheckpointError:
            self._can_follow = False
            return False
        saved = self._all_rows(reader)
        if not can_follow(self._folder, base, saved):
            self._can_follow = False
            return False
        names, is_current = self._source.table_names(), self._folder.published.newest_step == self._since
        for table, rows in saved.items():
            differs = difference(base, overlay, table, rows)
            deleted = [] if differs.deleted is None else [differs.deleted]
            keys = np.concatenate([*differs.key_blocks(), *deleted])
            self._changed.note(self._since + 1, np.full(len(keys), names.index(table)), keys)
            is_current = is_current and not len(keys)
        return is_current

    def _all_rows(self, reader: CheckpointReader | None) -> dict[str, ServedRows]:
        """Return the rows of the checkpoint that a run resumes from; none where it begins."""
        if reader is None:
            return served(self._format, {}, self._tables, lambda: None)
        return {table: reader.format(table).served_rows(reader, table) for table in self._tables}


def run_name(folder: Path | None, reader: CheckpointReader | None) -> str:
    """Return a name for a run that no other has; the same when it resumes."""
    if known := _known_name(folder, reader):
        return known
    made = secrets.token_hex(8)
    if folder is not None:
        write_text(folder / PUBLISH_FILE, json.dumps({"run": made}))
    return made


def check_folder(path: Path, folder: Path | None, reader: CheckpointReader | None) -> None:
    """Refuse to publish where another run does, before anything is written.

    Raises:
        ConfigError: it says whose the folder is.
    """
    existing(path, _known_name(folder, reader))


def _known_name(folder: Path | None, reader: CheckpointReader | None) -> str:
    if reader is not None and PUBLISHED_BY in reader.facts:
        return str(reader.facts[PUBLISHED_BY])
    path = None if folder is None else folder / PUBLISH_FILE
    if path is None or not path.is_file():
        return ""
    return str(json.loads(path.read_text(encoding="utf-8"))["run"])


def state_of(trainer: Trainer, event_time: float | None) -> State:
    """Copy all that is published of a trainer but its rows."""
    moment = Moment(trainer.step, trainer.samples, time.time(), event_time)
    model = trainer.model
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    weights = {name: one.detach().cpu().clone() for name, one in tensors.items()}
    return State(moment, weights, dict(trainer.key_kinds))


def uncounted() -> Counter:
    """Return a counter for work that nobody watches."""
    return Counter(1, lambda done, total: None)
