"""`TableLayout`: what every rank knows of the tables, and how their rows are held on a cluster.

The layout of whole rows is here. Another way to hold rows (`rowhaul.pruning.layout` keeps them in chunks)
overrides what differs; the runtime asks the layout and never what kind of rows it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch

from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.local_rows import TableRows
from rowhaul.optim import SGD, RowOptimizerRule
from rowhaul.runtime.flush import num_flushed_rows
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.runtime.worker_rows import CachedRows
from rowhaul.schedule import HotRows, IdBatch, Plan, RowPolicy, Scheduler, ScheduleSettings, Topology
from rowhaul.schedule.sizes import RowSizes
from rowhaul.store import TableGroup, TableSpec
from rowhaul.store.packing import PLAIN
from rowhaul.store.row_format import format_of, load_named

if TYPE_CHECKING:
    from rowhaul.runtime.lookups import Rows
    from rowhaul.runtime.runtime import Runtime

_ON_A_CARD = "rowhaul.device.host_indexed.layout:CardLayout"  # loaded where there is one: it needs Triton


@dataclass(frozen=True)
class TableLayout:
    """The tables in the order that plans number them; all rows whole."""

    specs: tuple[TableSpec, ...]
    optimizer: RowOptimizerRule
    dtype: str
    seed: int
    keeps_hot_rows: ClassVar[bool] = (
        True  # whether replicated rows stay the same unless somebody changes them
    )

    row_dtype: str = field(default=PLAIN, kw_only=True)  # what values are held and sent in

    @property
    def row_format(self) -> str:
        """The format of the rows."""
        return "whole" if self.row_dtype == PLAIN else self.row_dtype

    def sizes(self) -> RowSizes:
        """Bytes of a record of each table, as the rows' format sends it."""
        return self._sizes

    @cached_property
    def _sizes(self) -> RowSizes:
        wire_bytes = format_of(self).wire_bytes
        widths = [(spec.dim, self.optimizer.state_width(spec.dim)) for spec in self.specs]
        values, states = zip(*(wire_bytes(*one, self.dtype) for one in widths), strict=True)
        # Sums over workers are taken in full precision.
        summed = tuple(spec.dim * np.dtype(self.dtype).itemsize for spec in self.specs)
        return RowSizes(values, states, summed)

    def groups(self) -> list[TableGroup]:
        """Make empty tables, those of one row size together."""
        dims = dict.fromkeys(spec.dim for spec in self.specs)
        together = [[spec for spec in self.specs if spec.dim == dim] for dim in dims]
        how = self.optimizer, self.dtype, self.seed, self.row_dtype
        return [TableGroup(specs, *how) for specs in together]

    def schedule_settings(
        self,
        config: Any,
        topology: Topology,
        *,
        seed: int = 0,
        hot: HotRows | None = None,
        speeds: Sequence[float] | None = None,
        policies: tuple[RowPolicy, ...] = (),
        may_stay_home: bool = False,
    ) -> ScheduleSettings:
        """Settings of the scheduler for these tables; ``config`` is a `rowhaul.train.ClusterConfig`.

        With ``may_stay_home`` it may choose to leave whole rows at home.
        """
        stays = may_stay_home and self.row_format == "whole"
        settings: ScheduleSettings = config.schedule(
            topology, self.sizes(), seed=seed, hot=hot, speeds=speeds, policies=policies, may_stay_home=stays
        )
        return settings

    def make_scheduler(self, settings: ScheduleSettings, ids: Iterable[IdBatch]) -> Scheduler:
        """Make a scheduler over the ids of rows."""
        return Scheduler(settings, ids)

    def settled(self) -> TableLayout:
        """The tables as training will leave them, as far as that can be known before."""
        return self

    def records_read(self, batches: list[IdBatch]) -> list[IdBatch]:
        """Return the records that batches of ids read, as far as that can be known before training."""
        return batches

    def records_at_first(self, batches: Iterable[IdBatch]) -> Iterable[IdBatch]:
        """Return the records that batches of ids would read when training begins."""
        return batches

    def on(self, device: torch.device) -> TableLayout:
        """Return the layout of a worker whose model is on a device: a card caches whole rows."""
        if device.type == "cpu" or self.row_format != "whole" or find_spec("triton") is None:
            return self
        there: TableLayout = load_named(_ON_A_CARD).of(self, device)
        return there

    def make_cache(self, groups: Sequence[FeatureGroup]) -> RowMemory:
        """Make a worker's cache: a group of tables for each group of features."""
        tables = [group.make_tables(self.optimizer, self.seed, self.row_dtype) for group in groups]
        return RowMemory(self, tables, makes_rows=False)

    def make_home(self, topology: Topology, rank: int) -> RowMemory:
        """Make the memory of a rank that stores rows, with those that exist before any is read."""
        return RowMemory(self)

    def make_upkeep(self, *, trains: bool) -> Upkeep:
        """Make what maintains rows between segments on this rank."""
        return Upkeep(self)

    def cached_rows(
        self, groups: Sequence[FeatureGroup], cache: RowMemory, rates: Rates, upkeep: Upkeep, *, bounded: bool
    ) -> CachedRows:
        """Make the row source of a worker."""
        return CachedRows(groups, cache, rates, bounded=bounded)

    def copied_rows(self, groups: Sequence[FeatureGroup]) -> CopiedRows:
        """Make a row source for rows that are only read, such as evaluation's."""
        values_only = SGD(lr=0.0)
        tables = [group.make_tables(values_only, self.seed, self.row_dtype) for group in groups]
        memory = RowMemory(self, tables, makes_rows=False)
        return CopiedRows(memory, TableRows(groups, memory.groups))


class CopiedRows:
    """Copies of rows, values only: the memory to write them to, and the source that a model reads."""

    def __init__(self, memory: RowMemory, source: TableRows) -> None:
        self.memory, self.source = memory, source

    def records_of(self, rows: Rows) -> Rows:
        """Name the records that hold rows, as homes know them."""
        return rows

    @property
    def allocated_bytes(self) -> int:
        """Bytes of records and index."""
        return sum(group.allocated_bytes for group in self.memory.groups)


class MaintainedTraining(Protocol):
    """What maintenance needs of the training that it is for."""

    settings: ScheduleSettings
    rates: Rates
    runtime: Runtime

    def replicate(self, hot: HotRows) -> Plan:
        """Replicate these rows, and no others; a collective call."""


class Upkeep:
    """Maintenance of rows between two segments: none where rows are whole."""

    def __init__(self, layout: TableLayout) -> None:
        self.layout = layout

    def until_next(self, iteration: int) -> int | None:
        """Iterations before `run` must be called; None: never."""
        return None

    def run(self, training: MaintainedTraining) -> list[Any]:
        """Do what is due; a collective call. Returns notes for the log."""
        return []

    def prepare_copies(self, runtime: Runtime) -> None:
        """Bring to this rank what finds rows that are only read, before `copied_rows`; a collective call."""

    def copied_rows(self, groups: Sequence[FeatureGroup]) -> CopiedRows:
        """Make a row source for rows that are only read, such as evaluation's."""
        return self.layout.copied_rows(groups)

    def count_rows(self, runtime: Runtime, flushed: RowMemory | None) -> int:
        """Count rows such that the sum over ranks is that of the model; a collective call."""
        home = runtime.mover.home
        return num_flushed_rows(home, flushed) if home is not None and flushed is not None else 0
