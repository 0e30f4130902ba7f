"""How much memory a run will need, before it runs: by table, by rank, by machine.

Counted are rows with optimizer state and index, caches, hot rows, the dense model with gradients and
optimizer, the tensors of a step, samples that wait, what the scheduler keeps, the buffers of saving, and the
process itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rowhaul.checkpoint.shard import FILE_BYTES
from rowhaul.data.schema import Schema
from rowhaul.data.stream import PREFETCHED_BATCHES
from rowhaul.schedule import RowSizes, Topology
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import TrainConfig
from rowhaul.train.run import EVALUATION_BATCH
from rowhaul.train.sizing_model import ModelSize
from rowhaul.train.sizing_store import Pruning, RowShape, index_bytes

# Of the scheduler, by row: a slot and its place in an index for one that a cache holds, both with room to
# grow; an entry in the order of each cache that holds it; a filter's bits for every row ever trained.
SLOT_BYTES, COPY_BYTES, SEEN_BYTES = 176, 48, 4  # measured on a scheduler with a million rows in caches
RESERVE = 0.1  # of all else: memory that was freed and is kept, and what nobody counts
# Of a checkpoint's file: rows that wait for it, the same joined, and as the bytes that are written.
_SAVED_COPIES = 3


@dataclass(frozen=True)
class TableSize:
    """Bytes that the rows of one table need in the stores."""

    name: str
    rows: int
    dim: int
    values: int
    state: int
    index: int  # with the entries of pruned rows

    @property
    def total(self) -> int:
        """All of it."""
        return self.values + self.state + self.index


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


@dataclass(frozen=True)
class SizeEstimate:
    """What a run will need."""

    tables: tuple[TableSize, ...]
    ranks: tuple[RankSize, ...]
    machines: tuple[tuple[int, ...], ...]  # ranks of each machine

    @property
    def machine_bytes(self) -> tuple[int, ...]:
        """Bytes that each machine needs."""
        return tuple(sum(self.ranks[rank].total for rank in ranks) for ranks in self.machines)

    @property
    def needed(self) -> int:
        """Bytes that the machine with most to hold needs."""
        return max(self.machine_bytes)


@dataclass(frozen=True)
class Run:
    """A run whose size is asked for.

    Args:
        config: of the run; its cluster says how many ranks there are.
        schema: of the data.
        rows: distinct keys by table.
        ids_per_sample: of all features together.
        model: see `measure_model`.
        process_bytes: what a process has in memory before it does anything.
        machines: that the ranks are spread over, as many on each.
        pruning: what is left of the rows; None: all.
    """

    config: TrainConfig
    schema: Schema
    rows: Mapping[str, int]
    ids_per_sample: float
    model: ModelSize
    process_bytes: int
    machines: int = 1
    pruning: Pruning | None = None

    def estimate(self) -> SizeEstimate:
        """The bytes of everything."""
        ranks = _Ranks(self)
        places = ranks.machines()
        readers = {max(some) for some in places if some}
        sizes = [ranks.size(rank, reads=rank in readers) for rank in range(ranks.num_ranks)]
        return SizeEstimate(self._tables(), tuple(sizes), tuple(places))

    @property
    def shape(self) -> RowShape:
        """Of a row; all tables of a run are alike."""
        config = self.config
        return RowShape(self.model.row_width, config.row_rule(), config.precision, self.pruning)

    def _tables(self) -> tuple[TableSize, ...]:
        shape = self.shape
        return tuple(
            TableSize(
                name=name,
                rows=self.rows[name],
                dim=shape.dim,
                values=round(self.rows[name] * shape.value_bytes),
                state=round(self.rows[name] * shape.state_bytes),
                index=index_bytes(self.rows[name]) + self.rows[name] * shape.entry_bytes,
            )
            for name in self.schema.tables
        )


class _Ranks:
    """Who holds what."""

    def __init__(self, run: Run) -> None:
        self.run, self.cluster = run, run.config.cluster
        self.topology: Topology | None = self.cluster.topology() if self.cluster.workers else None
        self.num_ranks = self.topology.num_ranks if self.topology else 1
        self.num_workers = self.topology.num_workers if self.topology else 1
        self.rows = [run.rows[name] for name in run.schema.tables]

    def machines(self) -> list[tuple[int, ...]]:
        """Ranks of each machine: blocks of them in order, as torchrun numbers them."""
        each = -(-self.num_ranks // self.run.machines)
        return [
            tuple(range(first, min(first + each, self.num_ranks))) for first in range(0, self.num_ranks, each)
        ]

    def size(self, rank: int, reads: bool) -> RankSize:
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
        if reads:
            parts["data"] = self._data_bytes()
            if topology is not None:
                parts["scheduler"] = self._scheduler_bytes(topology)
        parts["process"] = self.run.process_bytes
        parts["reserve"] = round(RESERVE * sum(parts.values()))
        return RankSize(rank, role, parts)

    def _stored(self, shards: int) -> dict[str, int]:
        shape = self.run.shape
        rows = {name: -(-self.run.rows[name] // shards) for name in self.run.schema.tables}
        groups = self.run.model.groups if self.topology is None else (tuple(rows),)
        records = sum(shape.stored_bytes(sum(rows[name] for name in group)) for group in groups)
        largest = max(rows.values()) * (shape.value_bytes + shape.state_bytes + 8)
        return {
            "rows": records,
            "index": sum(map(index_bytes, rows.values())),
            "saving": round(min(_SAVED_COPIES * FILE_BYTES, _SAVED_COPIES * largest)),
        }

    def _cached(self, topology: Topology) -> dict[str, int]:
        """A worker's cache and hot rows, each with an index."""
        shape, hot = self.run.shape, self.cluster.num_hot_rows
        cached = self._cached_rows(topology)
        share = cached / max(sum(self.rows), 1)
        parts = {"cache": shape.stored_bytes(cached) + sum(index_bytes(round(n * share)) for n in self.rows)}
        if hot:
            parts["hot rows"] = shape.stored_bytes(hot) + index_bytes(hot)
        return parts

    def _cached_rows(self, topology: Topology) -> int:
        shape = self.run.shape
        sizes = RowSizes(
            (max(1, round(shape.value_bytes)),) * len(self.rows), (round(shape.state_bytes),) * len(self.rows)
        )
        settings = self.cluster.schedule(topology, sizes).cache
        capacity = settings.capacity if isinstance(settings.capacity, int) else max(settings.capacity)
        rows = capacity if settings.unit == "rows" else capacity // max(sizes.records)
        return min(rows, sum(self.rows))

    def _step_bytes(self) -> int:
        """What a step keeps for its backward pass, as much again for gradients, and those of the rows.

        Or what an evaluation keeps of a batch, where that is more.
        """
        kept, rows = self.run.model.per_sample, self._row_bytes_per_sample()
        training = -(-self.run.config.batch_size // self.num_workers) * (2 * kept + rows)
        evaluation = -(-EVALUATION_BATCH // self.num_workers) * (kept + rows)
        return round(max(training, evaluation))

    def _row_bytes_per_sample(self) -> float:
        return self.run.ids_per_sample * replace(self.run.shape, pruning=None).value_bytes

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
        slots = min(rows, topology.num_workers * cached + window)
        return round(SLOT_BYTES * slots + COPY_BYTES * topology.num_workers * cached + SEEN_BYTES * rows)


def cluster_on(machines: int, cluster: ClusterConfig) -> ClusterConfig:
    """The same cluster with a worker that stores its share of the rows on each of so many machines."""
    return replace(cluster, workers=machines, colocated=True, shares="equal", links="equal")
