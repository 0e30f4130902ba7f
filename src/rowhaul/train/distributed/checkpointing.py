"""Checkpoints of a cluster: every rank writes what it holds, and all ranks resume from it together.

The rows are written flushed and by key, by the ranks that store them, as one process writes them (see
`cluster_rows`). Beside them is what the same cluster needs to continue with the same bits (see `sidecar`),
and the state of its scheduler. Another cluster, or one process, ignores that and has the same model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from rowhaul.checkpoint import (
    MANIFEST_FILE,
    CheckpointReader,
    Place,
    Shard,
    ShardWriter,
    as_place,
)
from rowhaul.checkpoint.choosing import Chosen, newest_intact
from rowhaul.checkpoint.layout import finished_checkpoints, step_folder, unfinished_folder
from rowhaul.checkpoint.location import storage_of
from rowhaul.checkpoint.writer import discard, prepare, publish
from rowhaul.cluster.checks import gather_texts
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.waiting import ranks_text, until
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError, ClusterError
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule import HotRows, Scheduler, ScheduleSettings
from rowhaul.schedule.arrays import named
from rowhaul.schedule.settings import differences
from rowhaul.store.row_format import format_of
from rowhaul.train import saved_lifetimes, snapshot
from rowhaul.train.distributed import sidecar
from rowhaul.train.distributed.checkpoint_places import damage_seen_by_all
from rowhaul.train.distributed.cluster_rows import SCHEDULE, ClusterRows, cluster_rows
from rowhaul.train.distributed.setup import Start
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.train.run_folder import check_same_data
from rowhaul.train.snapshot import Trained

_LIFETIMES = "lifetimes"  # the part of it that is not bound to the cluster
_HOT = "hot"  # file of the replicated rows
_PRESENT_SECONDS = 30.0  # in which all ranks must have called
_WRITING_SECONDS = 24 * 3600.0  # a rank that dies while it writes is noticed by its heartbeat
_SEEN_SECONDS = 10.0  # network file systems show a new file with a delay


def save(
    cluster: Cluster,
    training: DistributedTraining,
    trainer: Trained,
    checkpoints: str | Place,
    facts: Mapping[str, Any] | None = None,
) -> Place:
    """Write a checkpoint to a URL, or into a folder that all ranks share; returns where it is.

    A collective call, between two segments, by stores, too: where ranks are missing, the others raise an
    error that names them. If one rank cannot write its part, all raise an error that says so, and there is
    no checkpoint. An existing one of the same step stays as it is.
    """
    path = as_place(checkpoints) / step_folder(trainer.step)
    if not _all_begin(cluster, path, trainer.step):
        return path
    flushed = training.flushed()
    rows = cluster_rows(format_of(training.layout), _table_names(trainer))
    gathered = rows.gather(training)
    cause = None
    try:
        part = _write_part(cluster, training, trainer, unfinished_folder(path), flushed, rows, gathered)
    except Exception as error:  # the others must not wait, nor take the checkpoint for whole
        part, cause = _Part(error=f"{type(error).__name__}: {error}"), error
    texts = gather_texts(cluster, "writing a checkpoint", part.to_json(), _WRITING_SECONDS)
    parts = [_Part.from_json(text) for text in texts]
    trouble = ""
    if cluster.rank == 0:
        every = {**(facts or {}), **(part.facts or {}), "cluster": _cluster_facts(training, parts)}
        trouble = _complete(cluster, path, every, parts)
        if trouble:
            discard(path)
    trouble = gather_texts(cluster, "completing a checkpoint", trouble, _WRITING_SECONDS)[0]
    if trouble:
        raise CheckpointError(f"there is no checkpoint of step {trainer.step:,}: {trouble}") from cause
    return path


def find(cluster: Cluster, checkpoints: str | Place, trainer: Trained) -> Saved | None:
    """Load the newest intact checkpoint of a folder or URL into a trainer, all but the rows.

    A collective call: all ranks take the same one, of those that rank 0 sees. None where there is none yet.
    Every rank compares a part of the files with their checksums before one is chosen; a damaged checkpoint is
    passed over by all. A checkpoint of another model is refused before anything changes.
    """
    place = as_place(checkpoints)
    names = [one.name for one in finished_checkpoints(place)] if cluster.rank == 0 else []
    names = json.loads(gather_texts(cluster, "resume", json.dumps(names), _PRESENT_SECONDS)[0])
    chosen = newest_intact([place / name for name in names], partial(damage_seen_by_all, cluster))
    if chosen is None:
        return None
    reader = CheckpointReader(chosen.path)
    snapshot.restore_dense(trainer, reader)
    rows = cluster_rows(format_of(trainer.collection.row_settings), _table_names(trainer))
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
        self._written: dict[str, Any] | None = reader.facts.get("cluster")
        if self._written is not None and len(self._written["threads"]) == cluster.num_ranks:
            torch.set_num_threads(self._written["threads"][cluster.rank])  # another number sums differently

    @property
    def start(self) -> Start:
        """Where `distribute` is to begin."""
        next_record = self._written["next_record"] if self._written is not None else 0
        return Start(self._reader.facts["step"], next_record, self._bring_scheduler)

    @property
    def samples(self) -> int:
        """Samples trained so far: where the data continues."""
        return int(self._reader.facts["samples"])

    def differences(self, settings: ScheduleSettings) -> list[str]:
        """Say what keeps the run from continuing with the same bits; the model is equal but for rounding."""
        if self._written is None:
            return ["it was saved by one process"]
        return differences(settings.describe(), self._written["settings"])

    def keep_prices(self, settings: ScheduleSettings) -> ScheduleSettings:
        """The settings with the link prices of the checkpoint, if it has as many: new measurements differ."""
        prices = tuple(self._written["prices"]) if self._written is not None else ()
        return replace(settings, prices=prices) if len(prices) == len(settings.prices) else settings

    def layout(self, layout: TableLayout) -> TableLayout:
        """The tables as the checkpoint has them."""
        return self._rows.saved_layout(self._reader, layout)

    def keep_hot(self, settings: ScheduleSettings) -> ScheduleSettings:
        """The settings with the replicated rows of the checkpoint: where a model chose them, they stay."""
        num_hot = self._written.get("num_hot", 0) if self._written is not None else 0
        if not num_hot:
            return replace(settings, hot=None)
        rows = self._reader.arrays(f"{_HOT}.safetensors")
        return replace(settings, hot=HotRows(rows["tables"], rows["keys"]))

    def check_same_data(self, stream: SampleStream) -> None:
        """Refuse other files than those trained on."""
        check_same_data(self._reader, stream)

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
            scheduler.restore({**state, **named(_LIFETIMES, known or {})})
            self._rows.restore_scheduler(scheduler, self._reader)
            return
        start = self.start
        scheduler.go_on_at(start.iteration, start.next_record)
        if known is not None:
            scheduler.recall(known)
        self._rows.start_scheduler(scheduler, self._reader)


def _table_names(trainer: Trained) -> list[str]:
    return [one.name for one in trainer.collection.embedding_bag_configs()]


@dataclass
class _Part:
    """What one rank has to say of its part of a checkpoint."""

    shard: Shard = field(default_factory=Shard)
    threads: int = 0
    next_record: int = 0  # where the scheduler's state was written
    error: str = ""
    facts: dict[str, Any] | None = None  # of rank 0, who keeps them

    def to_json(self) -> str:
        return json.dumps([self.shard.to_json(), self.threads, self.next_record, self.error])

    @classmethod
    def from_json(cls, text: str) -> _Part:
        shard, *others = json.loads(text)
        return cls(Shard.from_json(shard), *others)


def _all_begin(cluster: Cluster, path: Place, step: int) -> bool:
    """Whether there is something to write; false on all ranks where the checkpoint is there already."""
    is_there, trouble = False, ""
    if cluster.rank == 0:
        try:
            is_there = storage_of(path).is_file(path / MANIFEST_FILE)
            if not is_there:
                prepare(path)
        except OSError as error:
            trouble = f"rank 0 cannot write to {path.parent}: {error}"
    text = json.dumps({"step": step, "is_there": is_there, "trouble": trouble})
    said = [json.loads(one) for one in gather_texts(cluster, "save", text, _PRESENT_SECONDS)]
    steps = [one["step"] for one in said]
    if len(set(steps)) > 1:
        raise ClusterError(
            f"ranks save different steps: {steps} (by rank). Saving is collective: every rank, stores too, "
            "must call it after the same step"
        )
    if said[0]["trouble"]:
        raise CheckpointError(said[0]["trouble"])
    return not said[0]["is_there"]


def _write_part(
    cluster: Cluster,
    training: DistributedTraining,
    trainer: Trained,
    folder: Place,
    flushed: RowMemory | None,
    rows: ClusterRows,
    gathered: Any,
) -> _Part:
    """Write what this rank holds."""
    label, mover = f"r{cluster.rank:04d}", training.runtime.mover
    shard = ShardWriter(folder, label)
    part = _Part(shard.written, torch.get_num_threads())
    num_workers = cluster.topology.num_workers
    rows.write(shard, label, training, flushed, gathered)
    sidecar.write(shard, label, sidecar.pieces(mover.cache, mover.home, flushed, num_workers))
    if cluster.rank == 0:
        part.facts = snapshot.save_dense(trainer, shard) | rows.facts(training)
    if cluster.rank == max(next(ranks for ranks in cluster.hosts if 0 in ranks)):
        state = training.runtime.feed.at_rest(lambda scheduler: scheduler.export())
        assert state is not None
        known = {name: state.pop(name) for name in list(state) if name.startswith(f"{_LIFETIMES}.")}
        shard.arrays(SCHEDULE, state)
        rows.write_scheduler(shard, training, gathered)
        if known:  # for any number of ranks: in a file of its own
            plain = {name.removeprefix(f"{_LIFETIMES}."): array for name, array in known.items()}
            saved_lifetimes.write(shard, plain, rows.tables)
        if (hot := training.settings.hot) is not None:
            shard.arrays(_HOT, {"tables": hot.tables, "keys": hot.keys})
        part.next_record = int(state["in_force.next_number"][0])
    return part


def _cluster_facts(training: DistributedTraining, parts: list[_Part]) -> dict[str, Any]:
    """Which cluster the sidecar is for, and who wrote what."""
    return {
        "settings": training.settings.describe(),
        "prices": list(map(int, training.settings.prices)),
        "num_hot": 0 if training.settings.hot is None else len(training.settings.hot),
        "next_record": max(part.next_record for part in parts),
        "threads": [part.threads for part in parts],
        "files": [list(part.shard.files) for part in parts],
    }


def _complete(cluster: Cluster, path: Place, facts: Mapping[str, Any], parts: list[_Part]) -> str:
    """Write the manifest if all parts are there, and seen here; returns what is wrong otherwise."""
    folder = unfinished_folder(path)
    for rank, part in enumerate(parts):
        who = ranks_text([rank], cluster.roles)
        if part.error:
            return f"{who} could not write its part of it: {part.error}"
        sizes = {name: entry["bytes"] for name, entry in part.shard.files.items()}
        if not until(partial(_are_seen, folder, sizes), _SEEN_SECONDS, cluster.failure.check):
            return f"rank 0 does not see in {folder} what {who} wrote there: {storage_of(folder).not_seen}"
    try:
        publish(path, facts, [part.shard for part in parts])
    except OSError as error:
        return f"{path} cannot be completed: {error}"
    return ""


def _are_seen(folder: Place, sizes: Mapping[str, int]) -> bool:
    try:
        return sizes.items() <= storage_of(folder).sizes(folder).items()
    except OSError:
        return False
