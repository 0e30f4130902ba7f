"""One rank's part of a cluster's checkpoint: taken between two segments, written then or beside training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rowhaul.checkpoint import Place, Shard, ShardWriter
from rowhaul.checkpoint.layout import unfinished_folder
from rowhaul.checkpoint.location import storage_of
from rowhaul.checkpoint.writer import discard, publish
from rowhaul.cluster.checks import gather_texts
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.rendezvous import Store
from rowhaul.cluster.waiting import ranks_text, until
from rowhaul.errors import CheckpointError
from rowhaul.store.row_format import format_of
from rowhaul.train import saved_lifetimes, snapshot
from rowhaul.train.deferred import DeferredWriter, Pace
from rowhaul.train.distributed.cluster_rows import SCHEDULE, ClusterRows, RankWriters, cluster_rows
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.train.save_thread import SaveCancelledError
from rowhaul.train.snapshot import Trained

LIFETIMES = "lifetimes"  # the part of the scheduler's state that is not bound to the cluster
HOT = "hot"  # file of the replicated rows
_WRITING_SECONDS = 24 * 3600.0  # a rank that dies while it writes is noticed by its heartbeat
_SEEN_SECONDS = 10.0  # network file systems show a new file with a delay


class ClusterSnapshot:
    """What this rank writes of a checkpoint; made together with the other ranks, between two segments.

    Rows are copied as `rowhaul.train.snapshot.Snapshot` does it; close it when it is written.
    """

    def __init__(
        self,
        cluster: Cluster,
        training: DistributedTraining,
        trainer: Trained,
        facts: Mapping[str, Any] | None,
        *,
        beside: bool,
    ) -> None:
        self._cluster, self._step = cluster, trainer.step
        self._rows = rows = cluster_rows(format_of(training.layout), table_names(trainer))
        self._writers = writers = RankWriters(
            cluster.rank, beside=beside, copies_rows=beside and rows.copies_rows
        )
        self._part = _Part(threads=torch.get_num_threads())
        self._facts = {**(facts or {})}
        self._of_cluster = {
            "settings": training.settings.describe(),
            "prices": list(map(int, training.settings.prices)),
            "num_hot": 0 if training.settings.hot is None else len(training.settings.hot),
        }
        try:
            gathered = rows.take(training, writers)
            changes = training.runtime.mover.changes
            self._changes = changes.seal(trainer.step) if changes is not None else None
            if cluster.rank == 0:
                self._facts |= snapshot.save_dense(trainer, writers.home) | rows.facts(training)
            if cluster.rank == max(next(ranks for ranks in cluster.hosts if 0 in ranks)):
                self._part.next_record = _take_scheduler(training, writers.home, rows, gathered)
        except BaseException:
            self.close()
            raise

    def write(self, path: Place, store: Store, pace: Pace = lambda: None) -> None:
        """Write this rank's part, wait for the others, complete the checkpoint; in any thread.

        ``store`` is a connection of the calling thread; ``pace`` is called between small pieces of work.
        """
        cluster, cause = self._cluster, None
        try:
            self._write_part(unfinished_folder(path), pace)
        except SaveCancelledError:
            if cluster.rank == 0:
                discard(path)
            raise
        except Exception as error:  # the others must not wait, nor take the checkpoint for whole
            self._part, cause = _Part(error=f"{type(error).__name__}: {error}"), error
        finally:
            self.close()
        meet = partial(gather_texts, cluster, seconds=_WRITING_SECONDS, store=store, check=pace)
        trouble = ""
        try:
            parts = [_Part.from_json(text) for text in meet("writing a checkpoint", self._part.to_json())]
            if cluster.rank == 0:
                facts = {**self._facts, "cluster": self._cluster_facts(parts)}
                trouble = _complete(cluster, path, facts, parts)
                if trouble:
                    discard(path)
        except BaseException:
            if cluster.rank == 0:
                discard(path)
            raise
        trouble = meet("completing a checkpoint", trouble)[0]
        if trouble:
            raise CheckpointError(f"there is no checkpoint of step {self._step:,}: {trouble}") from cause

    def is_crowded(self) -> bool:
        """Whether it should be written faster: training copies many rows."""
        return self._rows.is_crowded()

    def changed_since(self, step: int) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """Yield the rows that changed after a step, or were dropped since, as (table, keys).

        Each rank yields those that it is home of: all ranks together yield all, each once. They are known
        from when `DistributedTraining.track_changes` was called on.
        """
        for table, keys in self._changes.since(step) if self._changes is not None else ():
            yield self._rows.tables[table], keys

    def close(self) -> None:
        """Free the snapshot."""
        self._rows.close()

    def _write_part(self, folder: Place, pace: Pace) -> None:
        """Write what this rank holds."""
        for label, writer in (
            (self._writers.worker_label, self._writers.worker),
            (self._writers.label, self._writers.home),
        ):
            shard = ShardWriter(folder, label)
            writer.write_to(shard, pace)
            self._part.shards.append(shard.written)

    def _cluster_facts(self, parts: list[_Part]) -> dict[str, Any]:
        """Which cluster the sidecar is for, and who wrote what."""
        return {
            **self._of_cluster,
            "next_record": max(part.next_record for part in parts),
            "threads": [part.threads for part in parts],
            "files": [[name for shard in part.shards for name in shard.files] for part in parts],
        }


def _take_scheduler(
    training: DistributedTraining, writer: DeferredWriter, rows: ClusterRows, gathered: Any
) -> int:
    """Collect the scheduler's state; returns the number of its next control record."""
    state = training.runtime.feed.at_rest(lambda scheduler: scheduler.export())
    assert state is not None
    known = {name: state.pop(name) for name in list(state) if name.startswith(f"{LIFETIMES}.")}
    rows.write_scheduler(writer, training, gathered, state)
    writer.arrays(SCHEDULE, state, given=not rows.copies_rows)  # arrays of its own
    if known:  # for any number of ranks: in a file of its own
        plain = {name.removeprefix(f"{LIFETIMES}."): array for name, array in known.items()}
        saved_lifetimes.write(writer, plain, rows.tables)
    if (hot := training.settings.hot) is not None:
        writer.arrays(HOT, {"tables": hot.tables, "keys": hot.keys})
    return int(state["in_force.next_number"][0])


@dataclass
class _Part:
    """What one rank has to say of its part of a checkpoint."""

    shards: list[Shard] = field(default_factory=list)
    threads: int = 0
    next_record: int = 0  # where the scheduler's state was written
    error: str = ""

    def to_json(self) -> str:
        shards = [shard.to_json() for shard in self.shards]
        return json.dumps([shards, self.threads, self.next_record, self.error])

    @classmethod
    def from_json(cls, text: str) -> _Part:
        shards, *others = json.loads(text)
        return cls(list(map(Shard.from_json, shards)), *others)


def _complete(cluster: Cluster, path: Place, facts: Mapping[str, Any], parts: list[_Part]) -> str:
    """Write the manifest if all parts are there, and seen here; returns what is wrong otherwise."""
    folder = unfinished_folder(path)
    for rank, part in enumerate(parts):
        who = ranks_text([rank], cluster.roles)
        if part.error:
            return f"{who} could not write its part of it: {part.error}"
        sizes = {name: entry["bytes"] for shard in part.shards for name, entry in shard.files.items()}
        if not until(partial(_are_seen, folder, sizes), _SEEN_SECONDS, cluster.failure.check):
            return f"rank 0 does not see in {folder} what {who} wrote there: {storage_of(folder).not_seen}"
    try:
        publish(path, facts, [shard for part in parts for shard in part.shards])
    except Exception as error:  # the others wait for an answer
        return f"{path} cannot be completed: {error}"
    return ""


def _are_seen(folder: Place, sizes: Mapping[str, int]) -> bool:
    try:
        return sizes.items() <= storage_of(folder).sizes(folder).items()
    except OSError:
        return False


def table_names(trainer: Trained) -> list[str]:
    """Names of the model's tables, in the order that plans number them."""
    return [one.name for one in trainer.collection.table_configs()]
