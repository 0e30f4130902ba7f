"""Pruning without tensors: what moves of pruned rows, by the accesses that decide which chunks there are.

Which columns are kept would need gradients, but for what moves it only matters how many. Rows that go home to
be narrowed are part of the plan after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from rowhaul.pruning.deciding.room import LEAST_ENTRIES
from rowhaul.pruning.layout import ChunkLayout, check_schedule
from rowhaul.pruning.scheduling import ChunkIds, ChunkScheduler
from rowhaul.schedule import IdBatch, Moves, Plan, ScheduleSettings


class SimulatedPruning(ChunkScheduler):
    """A scheduler that prunes by itself when it is time.

    Args:
        settings: with sizes of chunks.
        layout: of the tables; its pruning goes by accesses.
        batches: ids of whole rows.
        least_entries: how many rows may always be tracked.
    """

    def __init__(
        self,
        settings: ScheduleSettings,
        layout: ChunkLayout,
        batches: Iterable[IdBatch],
        least_entries: int = LEAST_ENTRIES,
    ) -> None:
        check_schedule(settings, layout)
        self._sent: list[Moves] = []  # on the way home, not in a plan yet
        super().__init__(settings, layout, batches, least_entries)

    def fill(self) -> bool:
        """Read on, over a pruning if it is time for one; false when there is nothing left to plan."""
        while not super().fill():
            if not self.ids.must_wait:
                return False
            layout = self.ids.layout
            if layout.awaits_columns and self.iteration >= layout.pruning.cold_start:
                self._sent.append(self.bring_home().moves)
                columns = np.tile(np.arange(layout.columns_to_keep), (len(layout.rows), 1))
                self.narrow(layout.narrowed(columns))
            if self.look():
                self.prune()
        return True

    def plan(self) -> Plan:
        """Decide the next iteration."""
        plan = super().plan()
        if self._sent:
            parts = [*self._sent, plan.moves]
            columns = zip(*(vars(one).values() for one in parts), strict=True)
            plan = replace(plan, moves=Moves(*map(np.concatenate, columns)))
            self._sent.clear()
        return plan


def chunks_read(layout: ChunkLayout, batches: Iterable[IdBatch]) -> list[IdBatch]:
    """The chunks that batches of rows read once these are pruned, by how often the batches read each."""
    batches = list(batches)
    by_access = replace(layout, pruning=replace(layout.pruning, utility="access"))
    ids = ChunkIds(by_access, iter(()), LEAST_ENTRIES)
    for one in batches:
        ids.read(one)
        ids.count_next()
    ids.map.prune(len(batches))
    return [ids.read(one) for one in batches]
