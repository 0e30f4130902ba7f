"""The tables of a model with a budget as a cluster has them.

To plans, moves, caches and homes a slot or a shared row is a row like any other, under the key that
`rowhaul.budget.slots` names it by. Which of them an id reads is resolved before anything is planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from rowhaul.budget.maps import SlotMaps, record_bytes
from rowhaul.budget.settings import BudgetSettings
from rowhaul.errors import ConfigError
from rowhaul.runtime.layout import TableLayout, Upkeep
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule import (
    HotRows,
    IdBatch,
    RowPolicy,
    Scheduler,
    ScheduleSettings,
    Topology,
    homes_of,
)


@dataclass(frozen=True)
class SlotLayout(TableLayout):
    """What every rank knows of tables within a budget."""

    keeps_hot_rows: ClassVar[bool] = False  # those that change hands leave them

    budget: BudgetSettings

    @property
    def row_format(self) -> str:
        """The format of the rows."""
        return self.budget.row_format

    def make_maps(self) -> SlotMaps:
        """Maps in which no id has a slot yet."""
        size_of = partial(record_bytes, optimizer=self.optimizer, dtype=self.dtype, row_dtype=self.row_dtype)
        return SlotMaps(self.specs, self.seed, self.budget, size_of)

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
        """Settings of the scheduler; rows are named as the budget names them, hot ones too."""
        check_cluster(config.sync, config.hot_rows)
        settings = super().schedule_settings(config, topology, seed=seed, hot=hot, speeds=speeds)
        check_policies(policies)
        return settings

    def make_scheduler(self, settings: ScheduleSettings, ids: Iterable[IdBatch]) -> Scheduler:
        """Make a scheduler that resolves ids to rows."""
        from rowhaul.budget.scheduling import SlotScheduler

        return SlotScheduler(settings, self, ids)

    def records_read(self, batches: list[IdBatch]) -> list[IdBatch]:
        """Return the rows that batches read once these batches have decided who has a slot."""
        from rowhaul.budget.scheduling import rows_read

        return rows_read(self, batches)

    def records_at_first(self, batches: Iterable[IdBatch]) -> Iterable[IdBatch]:
        """Return the rows that batches read if they are the first: empty slots, then shared rows."""
        from rowhaul.budget.scheduling import SlotIds

        return map(SlotIds(self, iter(())).read, batches)

    def make_home(self, topology: Topology, rank: int) -> RowMemory:
        """Make the memory of a rank that stores rows, with the shared rows of which it is the home."""
        home = super().make_home(topology, rank)
        for tables, one in self.make_maps():
            numbers = np.repeat(tables, one.shared_sizes).astype(np.int32)
            names = np.concatenate([-1 - np.arange(size) for size in one.shared_sizes.tolist()])
            here = homes_of(numbers, names, topology) == rank
            home.make(numbers[here], names[here])
        return home

    def make_upkeep(self, *, trains: bool) -> Upkeep:
        """Make what hands rows over between segments."""
        from rowhaul.budget.cluster.upkeep import ClusterBudget

        return ClusterBudget(self)


def slot_layout(whole: TableLayout, budget: BudgetSettings) -> SlotLayout:
    """The layout within a budget of tables of whole rows."""
    return SlotLayout(
        whole.specs, whole.optimizer, whole.dtype, whole.seed, budget, row_dtype=budget.row_dtype
    )


def check_cluster(sync: str, hot_rows: int | str = 0) -> None:
    """Refuse a cluster's settings that a budget does not go together with."""
    if isinstance(hot_rows, str):
        raise ConfigError(
            f"cluster.hot_rows is {hot_rows}, which compares sets of rows on the first batches, but with "
            "prune.budget rows change hands: give a number of shared rows to replicate, or 0"
        )
    mode = sync.partition(":")[0]
    reasons = {
        "static": "its hot rows stay the same, but rows of a budget change hands",
        "bounded": "workers may know different versions of a row, but one that changes hands begins with one",
        "at-home": "it plans no rows, and they change hands by a plan",
    }
    if mode in reasons:
        raise ConfigError(
            f"cluster.sync is {sync}, which does not go together with prune.budget: {reasons[mode]}; set it "
            "to on-demand or full, or leave out prune"
        )


def check_policies(policies: Sequence[RowPolicy]) -> None:
    """Refuse tables that admit or drop rows."""
    if not all(policy.keeps_all for policy in policies):
        raise ConfigError(
            "prune.budget decides by itself which ids have rows of their own, but tables have policies that "
            "admit and drop rows; leave out one of them"
        )


def check_schedule(settings: ScheduleSettings, layout: SlotLayout) -> None:
    """Refuse what a budget does not go together with, and sizes of other rows."""
    check_cluster(settings.sync_mode.name)
    check_policies(settings.row_policies)
    if settings.sizes != layout.sizes():
        raise ConfigError(
            f"the schedule's settings are for rows of {settings.sizes}, but tables have {layout.sizes()}: "
            "take sizes of layout_of(collection).sizes()"
        )
