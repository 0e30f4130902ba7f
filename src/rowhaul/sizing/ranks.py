"""What each rank of a run holds: its part of the rows, caches, the model, and what it takes to plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rowhaul.checkpoint.shard import FILE_BYTES
from rowhaul.data.stream import PREFETCHED_BATCHES
from rowhaul.pruning.sizing import Held, chunk_store_bytes, entries_by_table, map_bytes, utility_log_bytes
from rowhaul.schedule import RowSizes, Topology
from rowhaul.sizing.rows import index_bytes
from rowhaul.train.run import EVALUATION_BATCH
from rowhaul.tuning.hot_set.controller import CACHE_SHARE

if TYPE_CHECKING:
    from rowhaul.sizing.sizing import Run

# Of the scheduler, by row: a slot and its place in an index for one that a cache holds, both with room to
# grow; an entry in the order of each cache that holds it; a filter's bits for every row ever trained.
SLOT_BYTES, COPY_BYTES, SEEN_BYTES = 176, 48, 4  # measured on a scheduler with a million rows in caches
RESERVE = 0.1  # of all else: memory that was freed and is kept, and what nobody counts
# Of a checkpoint's file: rows that wait for it, the same joined, and as the bytes that are written.
_SAVED_COPIES = 3


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
        self.kept = {name: one.rows for name, one in run.kept.items()}
        self.rows = list(self.kept.values())
        self.held = run.pruned.held(sum(self.rows)) if run.pruned is not None else None

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
        if stores:
            parts |= self._stored(1 if topology is None else topology.num_shards)
        if topology is not None and trains:
            parts |= self._cached(topology)
        parts["dense model"] = self.run.model.dense if trains else self.run.model.weights
        if trains:
            parts["step"] = self._step_bytes()
        policies = sum(one.policy_bytes for one in self.run.kept.values())
        if policies and (topology is None or reads):
            parts["policies"] = policies
        if reads:
            parts["data"] = self._data_bytes()
            if topology is not None:
                parts["scheduler"] = self._scheduler_bytes(topology)
                if self.held is not None:
                    parts["chunk map"] = map_bytes(self.held, self.kept)
        parts["process"] = self.run.process_bytes
        parts["reserve"] = round(RESERVE * sum(parts.values()))
        return RankSize(rank, role, parts)

    def _stored(self, shards: int) -> dict[str, int]:
        if self.held is not None:
            return self._stored_chunks(self.held, shards)
        shape = self.run.shape
        rows = {name: -(-count // shards) for name, count in self.kept.items()}
        groups = self.run.model.groups if self.topology is None else (tuple(rows),)
        records = sum(shape.stored_bytes(sum(rows[name] for name in group)) for group in groups)
        largest = max(rows.values()) * (shape.value_bytes + shape.state_bytes + 8)
        return {
            "rows": records,
            "index": sum(map(index_bytes, rows.values())),
            "saving": round(min(_SAVED_COPIES * FILE_BYTES, _SAVED_COPIES * largest)),
        }

    def _stored_chunks(self, held: Held, shards: int) -> dict[str, int]:
        largest = held.bytes * max(self.rows, default=0) / max(sum(self.rows), 1)
        saving = round(min(_SAVED_COPIES * FILE_BYTES, _SAVED_COPIES * largest / shards))
        if self.topology is not None:  # chunks are rows of their own; their entries are in the map
            here = -(-held.num_chunks // shards)
            return {"rows": chunk_store_bytes(held, here, self.kept), "saving": saving}
        index = sum(map(index_bytes, entries_by_table(held, self.kept).values()))
        return {"rows": held.bytes, "index": index, "saving": saving}

    def _cached(self, topology: Topology) -> dict[str, int]:
        """A worker's cache and hot rows, each with an index."""
        shape, cached = self.run.shape, self._cached_rows(topology)
        if self.held is not None:
            each = self.run.ids_per_sample * self.run.config.batch_size / topology.num_workers
            assert self.run.pruned is not None
            settings = self.run.pruned.settings
            parts = {"cache": chunk_store_bytes(self.held, cached, self.kept)}
            if not settings.by_access:  # workers log what they measure
                parts["utilities"] = utility_log_bytes(self.held, round(each * settings.period))
            return parts
        hot = self.cluster.num_hot_rows
        if self.cluster.hot_is_auto:  # the model that chooses never takes more
            hot = round(CACHE_SHARE * cached)
        share = cached / max(sum(self.rows), 1)
        parts = {"cache": shape.stored_bytes(cached) + sum(index_bytes(round(n * share)) for n in self.rows)}
        if hot:
            parts["hot rows"] = shape.stored_bytes(hot) + index_bytes(hot)
        return parts

    def _cached_rows(self, topology: Topology) -> int:
        """Rows that a cache holds, or chunks where rows are in chunks."""
        shape, held = self.run.shape, self.held
        values, state = shape.value_bytes, shape.state_bytes
        if held is not None:
            values, state = held.chunk_values, held.chunk_bytes - held.chunk_values
        sizes = RowSizes((values,) * len(self.rows), (state,) * len(self.rows))
        settings = self.cluster.schedule(topology, sizes).cache
        capacity = settings.capacity if isinstance(settings.capacity, int) else max(settings.capacity)
        if settings.unit != "rows":
            capacity //= max(sizes.records)
        elif held is not None and not str(self.cluster.cache).strip()[-1:].isalpha():
            capacity *= held.chunks_of_row  # a cache of so many rows holds as many times their chunks
        return min(capacity, sum(self.rows) if held is None else held.num_chunks)

    def _step_bytes(self) -> int:
        """What a step keeps for its backward pass, as much again for gradients, and those of the rows.

        Or what an evaluation keeps of a batch, where that is more.
        """
        kept, rows = self.run.model.per_sample, self._row_bytes_per_sample()
        training = -(-self.run.config.batch_size // self.num_workers) * (2 * kept + rows)
        evaluation = -(-EVALUATION_BATCH // self.num_workers) * (kept + rows)
        return round(max(training, evaluation))

    def _row_bytes_per_sample(self) -> float:
        return self.run.ids_per_sample * self.run.shape.value_bytes

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
        cached, rows = self._cached_rows(topology), sum(self.rows)
        window = (self.cluster.look_ahead + 2) * self.run.config.batch_size * self.run.ids_per_sample
        if self.held is not None:
            rows, window = self.held.num_chunks, window * self.held.chunks_of_row
        slots = min(rows, topology.num_workers * cached + window)
        return round(SLOT_BYTES * slots + COPY_BYTES * topology.num_workers * cached + SEEN_BYTES * rows)
