"""How much memory a run will need, before it runs: by table, by rank, by machine.

Counted are rows with optimizer state and index, or what pruning and the policies of tables leave of them,
caches, hot rows, the dense model with gradients and optimizer, the tensors of a step, samples that wait, what
the scheduler keeps, what saving beside training and flushing take, and the process itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from rowhaul.data.schema import Schema
from rowhaul.pruning.config import UNPRUNED
from rowhaul.sizing.card import CardSize, card_size
from rowhaul.sizing.model import ModelSize
from rowhaul.sizing.policies import KeptRows, kept_rows
from rowhaul.sizing.ranks import Ranks, RankSize
from rowhaul.store.row_format import RowFormat, format_of
from rowhaul.store.row_parts import RowEstimate, RowShape
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import TrainConfig


@dataclass(frozen=True)
class TableSize:
    """Bytes that the rows of one table need in the stores."""

    name: str
    rows: int
    dim: int
    values: int
    state: int
    index: int  # with what else finds rows

    @property
    def total(self) -> int:
        """All of it."""
        return self.values + self.state + self.index


@dataclass(frozen=True)
class SizeEstimate:
    """What a run will need."""

    tables: tuple[TableSize, ...]
    ranks: tuple[RankSize, ...]
    machines: tuple[tuple[int, ...], ...]  # ranks of each machine
    card: CardSize | None = None  # where the model is on one

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
        table_ids_per_sample: by table; none: not known, so that policies that go by it bound nothing.
        samples: of an epoch; 0: not known.
        batch_rows: different rows of a batch; 0: not known.
    """

    config: TrainConfig
    schema: Schema
    rows: Mapping[str, int]
    ids_per_sample: float
    model: ModelSize
    process_bytes: int
    machines: int = 1
    table_ids_per_sample: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    batch_rows: int = 0

    @property
    def unpruned(self) -> Run:
        """The same run with all of its rows."""
        return replace(self, config=replace(self.config, prune=UNPRUNED))

    @property
    def format(self) -> RowFormat:
        """The format of its rows."""
        return format_of(self.config.row_settings())

    @cached_property
    def row_estimate(self) -> RowEstimate:
        """What its rows take."""
        config = self.config
        rows = {name: one.rows for name, one in self.kept.items()}
        ids = config.batch_size * self.ids_per_sample
        return self.format.estimate(self.shape, rows, ids, config.row_settings())

    @cached_property
    def kept(self) -> dict[str, KeptRows]:
        """The rows of each table that its policy leaves."""
        config, tables = self.config, list(self.schema.tables)
        policies = config.row_policies(tables)
        return {
            name: kept_rows(
                policy,
                self.rows[name],
                self.table_ids_per_sample.get(name, float("inf")),
                config.batch_size,
                self.samples * config.epochs,
            )
            for name, policy in zip(tables, policies, strict=True)
        }

    def check(self) -> None:
        """Refuse settings without room for even one batch."""
        self.row_estimate.check_batch(self.batch_rows)

    def estimate(self) -> SizeEstimate:
        """The bytes of everything."""
        ranks = Ranks(self)
        places = ranks.machines()
        readers = {max(some) for some in places if some}
        sizes = [ranks.size(rank, reads=rank in readers) for rank in range(ranks.num_ranks)]
        tables = tuple(
            TableSize(name, self.kept[name].rows, self.shape.dim, *parts)
            for name, parts in self.row_estimate.tables().items()
        )
        return SizeEstimate(tables, tuple(sizes), tuple(places), card_size(self, ranks.step_bytes()))

    @property
    def shape(self) -> RowShape:
        """Of a row; all tables of a run are alike."""
        return RowShape(self.model.row_width, self.config.row_rule(), self.config.precision)


def cluster_on(machines: int, cluster: ClusterConfig) -> ClusterConfig:
    """Return the same cluster with one worker on each machine, which stores its share of the rows."""
    return replace(cluster, workers=machines, colocated=True, shares="equal", links="equal")
