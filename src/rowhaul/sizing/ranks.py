"""What each rank of a run holds: its part of the rows, caches, the model, and what it takes to plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rowhaul.checkpoint.shard import FILE_BYTES
from rowhaul.data.stream import PREFETCHED_BATCHES
from rowhaul.runtime.flush import SLICE_ROWS
from rowhaul.schedule import RowSizes, Topology
from rowhaul.sizing.card import beside_cache, holds_all, is_on_card
from rowhaul.store.footprint import index_bytes, records_bytes
from rowhaul.store.snapshot import KEPT_SHARE, MARK_BYTES, STATE_BYTES
from rowhaul.train.cluster_config import AT_HOME
from rowhaul.train.run import EVALUATION_BATCH
from rowhaul.tuning.hot_set.controller import CACHE_SHARE

if TYPE_CHECKING:
    from rowhaul.sizing.sizing import Run

# Of the scheduler, by row: a slot and its place in an index for one that a cache holds, both with room to
# grow; an entry in the order of each cache that holds it; a filter's bits for every row ever trained.
SLOT_BYTES, COPY_BYTES, SEEN_BYTES = 176, 48, 4  # measured on a scheduler with a million rows in caches
RESERVE = 0.1  # of all else: memory that was freed and is kept, and what is not counted
# Of a checkpoint's file: rows that wait for it, and the same joined.
_SAVED_COPIES = 2
# Of the scheduler, by row that a cache holds, when its state is saved; a flush takes less.
_EXPORT_BYTES = 144  # measured likewise, with bounded staleness; 106 on demand
_FLUSH_PLAN_BYTES = 128  # of a row in a slice of a flush: the plan, and as one rank carries it out


@dataclass(frozen=True)
class RankSize:
    """Bytes of one rank, by what they are for."""

    rank: int
    role: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """At the peak: while it saves."""
        return sum(self.parts.values())


class Ranks:
    """Who holds what of a run."""

    def __init__(self, run: Run) -> None:
        self.run, self.cluster = run, run.config.cluster
        self.topology: Topology | None = self.cluster.topology() if self.cluster.workers else None
        self.num_ranks = self.topology.num_ranks if self.topology else 1
        self.num_workers = self.topology.num_workers if self.topology else 1
        self.rows = run.row_estimate
        self._stays_home = self.topology is not None and _sync_of(run) == AT_HOME

    def machines(self) -> list[tuple[int, ...]]:
        """Ranks of each machine: blocks of them in order, as torchrun numbers them."""
        each = -(-self.num_ranks // self.run.machines)
        return [
            tuple(range(first, min(first + each, self.num_ranks))) for first in range(0, self.num_ranks, each)
        ]

    def size(self, rank: int, reads: bool) -> RankSize:
        """What one rank needs; one of each machine reads the files."""
        topology = self.topology
        trains = rank < self.num_workers
        stores = topology is None or topology.colocated or not trains
        role = "the process" if topology is None else "worker" if trains else "store"
        parts: dict[str, int] = {}
        if stores and not holds_all(self.run):
            shards = None if topology is None else topology.num_shards
            parts |= self.rows.stored(shards, self.run.model.groups)
        moves = topology if not self._stays_home else None  # where rows move between caches
        if moves is not None and trains:
            parts |= self._cached(moves)
        if self.run.config.device_bytes:
            parts["card's cache"] = beside_cache(self.run)
        parts["saving"] = self._saving_bytes(parts, trains, stores, reads)
        if moves is not None:
            parts["flushing"] = self._flushing_bytes(moves, stores)
        if not is_on_card(self.run):
            parts["dense model"] = self.run.model.dense if trains else self.run.model.weights
            if trains:
                parts["step"] = self.step_bytes()
        policies = sum(one.policy_bytes for one in self.run.kept.values())
        if policies and (topology is None or reads):
            parts["policies"] = policies
        if reads:
            parts["data"] = self._data_bytes()
            if topology is not None and (moves is not None or self.run.config.monitoring.explain):
                parts["scheduler"] = self._scheduler_bytes(topology)
                parts |= self.rows.host()
        parts["process"] = self.run.process_bytes
        parts["reserve"] = round(RESERVE * sum(parts.values()))
        return RankSize(rank, role, parts)

    def _saving_bytes(self, parts: dict[str, int], trains: bool, stores: bool, reads: bool) -> int:
        """What a checkpoint takes while it is written beside training."""
        topology, rows = self.topology, self.rows
        held = {"rows": 0, "cache": 0}  # records of this rank
        if stores:
            held["rows"] = -(-rows.num_records // (topology.num_shards if topology else 1))
        if topology is not None and trains:
            held["cache"] = self._cached_records(topology)
        largest = rows.largest_table(topology.num_shards if topology else 1) if stores else 0
        largest = max(largest, parts.get("cache", 0))
        saving = _SAVED_COPIES * min(FILE_BYTES, largest)
        if self.run.format.has_snapshots and not holds_all(self.run):
            each = STATE_BYTES + (MARK_BYTES if topology else 0) + KEPT_SHARE * rows.record_bytes
            saving += each * sum(held.values())
        else:  # all is copied first
            saving += parts.get("rows", 0) + parts.get("cache", 0)
        if holds_all(self.run):
            saving += rows.num_records * rows.record_bytes
        if topology is not None and reads:
            cached = topology.num_workers * self._cached_records(topology)
            saving += _EXPORT_BYTES * min(rows.num_records, cached)
        return round(saving)

    def _flushing_bytes(self, topology: Topology, stores: bool) -> int:
        """What it takes to evaluate: a slice of rows on their way, and at homes copies of cached rows."""
        cached = min(topology.num_workers * self._cached_records(topology), self.rows.num_records)
        flushing = min(SLICE_ROWS, cached) * (_FLUSH_PLAN_BYTES + self.rows.record_bytes)
        if stores:
            copies = -(-cached // topology.num_shards)
            flushing += records_bytes(copies, self.rows.record_bytes) + index_bytes(copies)
        return flushing

    def _cached(self, topology: Topology) -> dict[str, int]:
        """A worker's cache and hot rows, each with an index."""
        cached, hot = self._cached_records(topology), self.cluster.num_hot_rows
        if self.cluster.hot_is_auto:  # the model that chooses never takes more
            hot = round(CACHE_SHARE * cached)
        parts = {"cache": self.rows.cached(cached)}
        if hot:
            parts["hot rows"] = records_bytes(hot, self.rows.record_bytes) + index_bytes(hot)
        ids = self.run.ids_per_sample * self.run.config.batch_size / topology.num_workers
        return parts | self.rows.worker(ids)

    def _cached_records(self, topology: Topology) -> int:
        """Records that a cache holds."""
        if self._stays_home:
            return 0
        rows, num_tables = self.rows, len(self.run.kept)
        state = rows.record_bytes - rows.record_values
        sizes = RowSizes((rows.record_values,) * num_tables, (state,) * num_tables)
        settings = self.cluster.cache_settings(sizes)
        capacity = settings.capacity if isinstance(settings.capacity, int) else max(settings.capacity)
        if settings.unit != "rows":
            capacity //= max(sizes.records)
        elif not str(self.cluster.cache).strip()[-1:].isalpha():
            capacity *= rows.records_per_row  # a cache given in rows holds all their records
        return min(capacity, rows.num_records)

    def step_bytes(self) -> int:
        """What a step keeps for its backward pass, as much again for gradients, and those of the rows.

        Or what an evaluation keeps of a batch, where that is more.
        """
        shape = self.run.shape
        kept = self.run.model.per_sample
        rows = self.run.ids_per_sample * shape.dim * np.dtype(shape.dtype).itemsize
        training = -(-self.run.config.batch_size // self.num_workers) * (2 * kept + rows)
        evaluation = -(-EVALUATION_BATCH // self.num_workers) * (kept + rows)
        return round(max(training, evaluation))

    def _data_bytes(self) -> int:
        """Batches that wait, of training and of evaluation; a shuffling window, and the same mixed."""
        schema, config = self.run.schema, self.run.config
        numbers = len(schema.ids) + len(schema.dense) + 1  # of four bytes each; the index has eight
        sample = 8 * self.run.ids_per_sample + 4 * numbers + 8
        ahead = self.cluster.look_ahead if self.topology else 0
        waiting = PREFETCHED_BATCHES + 2
        samples = (waiting + ahead) * config.batch_size + waiting * EVALUATION_BATCH + 2 * config.shuffle_rows
        return round(sample * samples)

    def _scheduler_bytes(self, topology: Topology) -> int:
        cached, every = self._cached_records(topology), self.rows.num_records
        window = (self.cluster.look_ahead + 2) * self.run.config.batch_size * self.run.ids_per_sample
        slots = min(every, topology.num_workers * cached + window * self.rows.records_per_row)
        return round(SLOT_BYTES * slots + COPY_BYTES * topology.num_workers * cached + SEEN_BYTES * every)


def _sync_of(run: Run) -> str:
    """How a run would synchronise rows on its machines."""
    config = run.config
    policies = config.row_policies(list(run.schema.tables))
    is_whole = config.row_settings() is None and not is_on_card(run)
    return config.cluster.on_hosts(run.machines).sync_of_rows(policies, may_stay_home=is_whole)
