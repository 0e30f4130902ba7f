"""Pruning without tensors: what moves of pruned rows, where their usefulness is how often they are read.

Accesses need ids only, so the simulator prunes exactly as a cluster with ``prune.utility: access`` does.
Which columns are kept would need gradients, but for what moves it only matters how many. What a pruning
itself sends, utilities that workers tell, is part of the plan after it, and so are rows that go home to be
narrowed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from rowhaul.pruning.chunk_ids import count_rows, match_rows
from rowhaul.pruning.chunk_map import ChunkMap
from rowhaul.pruning.cluster.coding import decode_told, encode_told
from rowhaul.pruning.cluster.utility_log import UtilityLog
from rowhaul.pruning.layout import ChunkLayout, check_schedule
from rowhaul.pruning.room import LEAST_ENTRIES
from rowhaul.pruning.scheduling import ChunkScheduler
from rowhaul.pruning.timing import next_stop
from rowhaul.schedule import IdBatch, Moves, Plan, ScheduleSettings
from rowhaul.schedule.plan import Kind, LiveRows, Payload


class SimulatedPruning(ChunkScheduler):
    """A scheduler that prunes by itself when it is time.

    Args:
        settings: with sizes of chunks.
        layout: of the tables; its pruning goes by accesses.
        batches: ids of whole rows.
        least_entries: how many rows may always be kept track of.
    """

    def __init__(
        self,
        settings: ScheduleSettings,
        layout: ChunkLayout,
        batches: Iterable[IdBatch],
        least_entries: int = LEAST_ENTRIES,
    ) -> None:
        check_schedule(settings, layout)
        self._ids: deque[IdBatch] = deque()  # of whole rows, in the window
        self._layout, self._num_chunks, self._num_tables = layout, layout.num_chunks, len(layout.rows)
        chunks = ChunkMap(layout, least_entries)
        self._utility_logs = [
            UtilityLog(layout.num_chunks, layout.pruning.decay) for _ in range(settings.topology.num_workers)
        ]
        self._sent: list[Moves] = []  # by prunings, not in a plan yet
        super().__init__(settings, chunks, self._noted(batches))

    def fill(self) -> bool:
        """Read on, over a pruning if it is time for one; false when there is nothing left to plan."""
        while not super().fill():
            if not self.chunks.is_due:
                return False
            if self._layout.awaits_columns and self.iteration >= self._layout.pruning.cold_start:
                self._narrow()
            may_prune = next_stop(self._layout.pruning, self.iteration - 1) == self.iteration
            if may_prune and self.look():
                self._prune()
        return True

    def plan(self) -> Plan:
        """Decide the next iteration, and count who reads what."""
        plan, ids = super().plan(), self._ids.popleft()
        assert plan.live is not None
        self._count(plan, ids, plan.live)
        if self._sent:
            plan = replace(plan, moves=_joined([*self._sent, plan.moves]))
            self._sent.clear()
        return plan

    def _noted(self, batches: Iterable[IdBatch]) -> Iterator[IdBatch]:
        for ids in batches:
            self._ids.append(ids)
            yield ids

    def _count(self, plan: Plan, ids: IdBatch, live: LiveRows) -> None:
        """Let every worker note how often it reads each row."""
        lengths = np.diff(ids.offsets)
        worker_of_id = np.repeat(plan.worker, lengths)
        for worker, utility_log in enumerate(self._utility_logs):
            some = np.flatnonzero(worker_of_id == worker)
            _, keys, starts, counts = count_rows(ids.tables[some], ids.keys[some], self._num_tables)
            tables = np.repeat(np.arange(self._num_tables, dtype=np.int32), np.diff(starts))
            places = match_rows(live.tables, live.keys, tables, keys)
            known = places >= 0
            amounts = np.repeat(counts[known].astype(np.float64)[:, None], self._num_chunks, axis=1)
            utility_log.add(live.numbers[places[known]], amounts, plan.iteration + 1)

    def _narrow(self) -> None:
        """Keep as many columns as a cluster would, whichever they are."""
        self._sent.append(self.bring_home().moves)
        columns = np.tile(np.arange(self._layout.columns_to_keep), (self._num_tables, 1))
        self._layout = self._layout.narrowed(columns)
        self.narrow(self._layout)

    def _prune(self) -> None:
        told = [encode_told(*utility_log.told(self.iteration)) for utility_log in self._utility_logs]
        for utility_log in self._utility_logs:
            utility_log.clear()
        self.chunks.learn([decode_told(data, self._num_chunks) for data in told], self.iteration)
        self.prune(self.chunks.decide(self.iteration))
        first = self.settings.topology.first_store
        sizes = [len(data) for data in told]
        others = [worker for worker, size in enumerate(sizes) if size and worker != first]
        self._sent.append(_told(others, [sizes[worker] for worker in others], first))


def chunks_read(layout: ChunkLayout, batches: Iterable[IdBatch]) -> list[IdBatch]:
    """The chunks that batches of rows read once these are pruned, by how often the batches read each."""
    batches, chunks = list(batches), ChunkMap(layout)
    utility_log = UtilityLog(layout.num_chunks, layout.pruning.decay)
    for now, ids in enumerate(batches, 1):
        _, live = chunks.take_in(ids)
        amounts = np.repeat(live.accesses.astype(np.float64)[:, None], layout.num_chunks, axis=1)
        utility_log.add(live.numbers, amounts, now)
    chunks.learn([utility_log.told(len(batches))], len(batches))
    chunks.carry_out(chunks.decide(len(batches)), len(batches))
    return [chunks.take_in(ids)[0] for ids in batches]


def _told(workers: list[int], sizes: list[int], target: int) -> Moves:
    """Utilities on their way to where it is decided, as if each worker's were one row."""
    count = len(workers)
    return Moves(
        kind=np.full(count, Kind.UPDATE_PUSH, np.uint8),
        payload=np.full(count, Payload.STATE, np.uint8),
        table=np.zeros(count, np.int32),
        key=np.zeros(count, np.int64),
        source=np.array(workers, np.int16),
        target=np.full(count, target, np.int16),
        num_bytes=np.array(sizes, np.int64),
        ready=np.zeros(count, np.int32),
        after=np.zeros(count, np.uint8),
        second=np.zeros(count, np.uint8),
    )


def _joined(parts: list[Moves]) -> Moves:
    return Moves(
        *(np.concatenate(columns) for columns in zip(*(vars(one).values() for one in parts), strict=True))
    )
