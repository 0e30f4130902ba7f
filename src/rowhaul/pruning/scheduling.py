"""A scheduler whose rows are chunks: ids of rows come in, chunks that are there are planned.

Chunks never change between two prunings, so batches are read no further ahead than the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from rowhaul.pruning.chunk_map import ChunkMap
from rowhaul.pruning.cluster.homecoming import flush_home_plan
from rowhaul.pruning.layout import ChunkLayout
from rowhaul.schedule import IdBatch, Plan, Scheduler, ScheduleSettings
from rowhaul.schedule.arrays import Arrays, Saved, named
from rowhaul.schedule.plan import LiveRows

_PART = "chunks"  # of a saved state


class ChunkScheduler(Scheduler):
    """Plans what moves of pruned rows.

    Args:
        settings: with sizes of chunks, by chunk table.
        chunks: which there are.
        batches: ids of whole rows.
    """

    def __init__(self, settings: ScheduleSettings, chunks: ChunkMap, batches: Iterable[IdBatch]) -> None:
        self.chunks = chunks
        self._rows: deque[LiveRows] = deque()  # of the batches in the window
        super().__init__(settings, _Chunked(chunks, iter(batches), self._rows))

    def plan(self) -> Plan:
        """Decide the next iteration."""
        return replace(super().plan(), live=self._rows.popleft())

    def bring_home(self) -> Plan:
        """Between two plans: what brings all rows home; from now on they are there."""
        plan = flush_home_plan(self.states(), self.settings.topology, self.settings.sizes)
        self.come_home()
        return plan

    def look(self) -> bool:
        """Between two plans, where rows may be pruned: if they are to be; otherwise batches are read on."""
        self._exhausted = False
        return self.chunks.look(self.iteration)

    def prune(self, decision: bytes) -> Plan:
        """Carry out what was decided.

        The plan's forgotten rows are the chunks that nobody has any more; its rows those that homes make.
        """
        pruned = self.chunks.carry_out(decision, self.iteration)
        self.forget(pruned.evicted.tables, pruned.evicted.keys)
        return replace(
            self.nothing(),
            tables=pruned.admitted.tables,
            keys=pruned.admitted.keys,
            forgotten_tables=pruned.evicted.tables,
            forgotten_keys=pruned.evicted.keys,
            num_expired=pruned.num_forgotten,
        )

    def narrow(self, layout: ChunkLayout) -> None:
        """Rows are at home and have fewer columns from now on."""
        self.resize(layout.sizes())
        self.chunks.use(layout)

    def nothing(self, rows: LiveRows | None = None) -> Plan:
        """A plan of no iteration and without moves, to share what else there is."""
        states = {name: column[:0] for name, column in self.states().items()}
        return replace(flush_home_plan(states, self.settings.topology, self.settings.sizes), live=rows)

    def go_on_at(self, iteration: int, next_record: int) -> None:
        """Before the first plan: count on from an earlier scheduler's."""
        super().go_on_at(iteration, next_record)
        self.chunks.go_on_at(iteration)

    def export(self) -> Arrays:
        """All that decides later plans."""
        return {**super().export(), **named(_PART, self.chunks.export())}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on where `export` was called."""
        saved = Saved(state)
        self.chunks.restore(saved.part(_PART))
        self.chunks.go_on_at(saved.number("iteration"))
        super().restore(state)


class _Chunked:
    """Batches of chunks up to the next pruning, and again after it."""

    def __init__(self, chunks: ChunkMap, batches: Iterator[IdBatch], rows: deque[LiveRows]) -> None:
        self._chunks, self._batches, self._rows = chunks, batches, rows

    def __iter__(self) -> _Chunked:
        return self

    def __next__(self) -> IdBatch:
        if self._chunks.is_due:
            raise StopIteration
        chunks, rows = self._chunks.take_in(next(self._batches))
        self._rows.append(rows)
        return chunks
