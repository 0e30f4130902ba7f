"""A scheduler whose rows are chunks: ids of rows come in, chunks that are there are planned.

Chunks never change between two prunings, so batches are read no further ahead than the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.chunk_kernels import name_chunks
from rowhaul.pruning.deciding.chunk_map import ChunkMap, Chunks
from rowhaul.pruning.deciding.entries import ABSENT, THERE
from rowhaul.pruning.deciding.room import LEAST_ENTRIES
from rowhaul.pruning.layout import ChunkLayout, check_schedule
from rowhaul.runtime.flush import flush_plan
from rowhaul.schedule import IdBatch, Moves, Plan, Scheduler, ScheduleSettings
from rowhaul.schedule.arrays import Arrays, Saved, named
from rowhaul.schedule.directory.distinct import distinct_by_appearance
from rowhaul.schedule.plan import LiveRows

_PART = "chunks"  # of a saved state
_COUNTS, _SUMS = "counts", "sums"  # of accesses, or of norms: utilities in it


class ChunkIds:
    """Batches of chunks up to where rows may be pruned next, and again after that.

    Args:
        layout: of the tables.
        batches: ids of whole rows.
        least_entries: how many rows may always be tracked.
    """

    def __init__(self, layout: ChunkLayout, batches: Iterator[IdBatch], least_entries: int) -> None:
        self.layout, self.map = layout, layout.make_map(least_entries)
        self.rows: deque[LiveRows] = deque()  # of the batches that are not planned yet
        self._batches = batches
        self.next_batch = 0  # the number of the batch that is read next
        self._num_known = 0  # batches whose new rows are tracked: some may be read again after a restart
        self._looked_at = 0  # iterations before the latest decision whether to prune

    def __iter__(self) -> ChunkIds:
        return self

    def __next__(self) -> IdBatch:
        if self.must_wait:
            raise StopIteration
        return self.read(next(self._batches))

    @property
    def must_wait(self) -> bool:
        """Whether rows, or columns, may be pruned before the next batch is read."""
        if self.layout.awaits_columns and self.next_batch >= self.layout.pruning.cold_start:
            return True
        return self.next_batch >= self.layout.pruning.next_stop(self._looked_at)

    def read(self, ids: IdBatch) -> IdBatch:
        """Track the rows of the next batch, and name its chunks."""
        num_tables = len(self.layout.rows)
        named_by, keys, starts, counts = distinct_by_appearance(ids.tables, ids.keys, num_tables)
        located = self.map.locate(keys, starts, named_by)
        if self.next_batch >= self._num_known:
            self.map.add_new([located], self.next_batch)
            self._num_known = self.next_batch + 1
        self.next_batch += 1
        known = np.flatnonzero(located.entries >= 0)
        slots = np.full((len(keys), self.map.num_chunks), ABSENT, np.int32)
        slots[known] = self.map.entries.slots(located.entries[known])[0]
        tables, numbers = located.tables(known).astype(np.int32), located.entries[known].astype(np.int32)
        self.rows.append(LiveRows(tables, keys[known], numbers, counts[known]))
        return IdBatch(*name_chunks(ids.offsets, ids.tables, ids.keys, named_by, slots))

    def count_next(self) -> LiveRows | None:
        """Count the accesses of the next batch to be planned; its rows, where workers measure them."""
        rows, iteration = self.rows.popleft(), self.next_batch - len(self.rows) - 1
        if not self.layout.pruning.by_access:
            return rows
        self.map.entries.count(rows.numbers.astype(np.int64), rows.accesses, iteration + 1)
        return None

    def look(self, now: int) -> bool:
        """Whether rows are to be pruned after step ``now``; if not, batches are read on."""
        self._looked_at = now
        return self.map.is_due(now)

    def start_at(self, iteration: int) -> None:
        """Read batches from this one on."""
        self.next_batch = self._num_known = self._looked_at = iteration

    def export(self) -> Arrays:
        """Everything, to continue from with the same bits."""
        rows = self.map.rows()
        present, utilities, touched = self.map.entries.saved(rows.numbers)
        num_numbers, free = self.map.entries.arena.numbering
        known = self.map.known(self._num_known, self.layout.awaits_columns)
        numbers = known["numbers"]
        facts = [*numbers[:4], num_numbers, self.map.num_chunks, numbers[4], numbers[6]]
        return {
            "tables": rows.tables.astype(np.int32),
            "keys": rows.keys,
            "numbers": rows.numbers.astype(np.int32),
            "present": present.reshape(-1),
            _COUNTS if self.layout.pruning.by_access else _SUMS: utilities.reshape(-1),
            "touched": touched,
            "free": free,
            "facts": np.array(facts, np.int64),
            "registers": known["registers"],
        }

    def restore(self, saved: Saved, iteration: int) -> None:
        """Continue where `export` was called; nothing may be tracked here yet."""
        facts = saved.array("facts", np.int64, 8).tolist()
        chunks = facts[5]
        tables = saved.array("tables", np.int32, below=len(self.layout.rows))
        keys = saved.array("keys", np.int64, len(tables))
        numbers = saved.array("numbers", np.int32, len(tables), below=max(facts[4], 1)).astype(np.int64)
        present = saved.array("present", np.bool_, len(tables) * chunks).reshape(-1, chunks)
        utilities: npt.NDArray[Any] = np.zeros(present.shape, np.float32)
        touched = np.zeros(len(tables), np.int32)
        for name, kind in ((_COUNTS, np.uint32), (_SUMS, np.float32)):  # older versions have a file of sums
            if name in saved:
                utilities = saved.array(name, kind, present.size).reshape(present.shape)
                touched = saved.array("touched", np.int32, len(tables))
        self.map.entries.arena.resume(facts[4], saved.array("free", np.int64))
        slots = np.where(present, np.int32(THERE), np.int32(ABSENT))
        self.map.put(tables.astype(np.int64), keys, numbers, slots, utilities, touched)
        registers = saved.array("registers", np.uint8, len(self.map.counter.registers))
        self.map.restore(np.array([*facts[:4], facts[6], 0, facts[7]]), registers)
        self.start_at(iteration)
        self._num_known = facts[2]

    def use(self, layout: ChunkLayout) -> None:
        """Switch to rows with fewer columns."""
        self.layout, self.map.sizes = layout, layout.part_sizes


class ChunkScheduler(Scheduler):
    """Plans what moves of pruned rows.

    Args:
        settings: with sizes of chunks, by chunk table.
        layout: of the tables.
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
        self.ids = ChunkIds(layout, iter(batches), least_entries)
        super().__init__(settings, self.ids)

    @property
    def map(self) -> ChunkMap:
        """Which chunks there are."""
        return self.ids.map

    def plan(self) -> Plan:
        """Decide the next iteration."""
        return replace(super().plan(), live=self.ids.count_next())

    def bring_home(self) -> Plan:
        """Between two plans: what brings all rows home; from now on they are there."""
        plan = self._flush_home(self.states())
        self.come_home()
        return plan

    def _flush_home(self, states: Arrays) -> Plan:
        """What brings rows home, from `Scheduler.states`; none of them is trained by it."""
        settings, nothing = self.settings, np.zeros(0, np.int64)
        return replace(
            flush_plan(states, settings.topology, settings.sizes),
            tables=nothing.astype(np.int32),
            keys=nothing,
            trainers=nothing.astype(np.uint64),
            states=nothing.astype(np.uint8),
        )

    def look(self) -> bool:
        """Between two plans: whether rows are to be pruned now; if not, batches are read on."""
        self._exhausted = False
        return self.ids.look(self.iteration)

    def prune(self) -> Plan:
        """Prune, between two plans.

        The plan's forgotten rows are the chunks that are dropped; its rows those that homes make.
        """
        pruned = self.map.prune(self.iteration)
        gone_tables, gone_keys = self._named(pruned.evicted)
        new_tables, new_keys = self._named(pruned.admitted)
        self.forget(gone_tables, gone_keys)
        return replace(
            self.nothing(),
            tables=new_tables,
            keys=new_keys,
            forgotten_tables=gone_tables,
            forgotten_keys=gone_keys,
            num_expired=len(pruned.decision.forget),
        )

    def _named(self, chunks: Chunks) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Chunks as rows of chunk tables."""
        tables = chunks.tables * self.map.num_chunks + chunks.places
        return tables.astype(np.int32), chunks.keys

    def narrow(self, layout: ChunkLayout) -> None:
        """Rows are at home and have fewer columns from now on."""
        self.resize(layout.sizes())
        self.ids.use(layout)

    def nothing(self, rows: LiveRows | None = None) -> Plan:
        """A plan of no iteration and without moves, to share what else there is."""
        states = {name: column[:0] for name, column in self.states().items()}
        return replace(self._flush_home(states), live=rows)

    def go_on_at(self, iteration: int, next_record: int) -> None:
        """Before the first plan: count on from an earlier scheduler's."""
        super().go_on_at(iteration, next_record)
        self.ids.start_at(iteration)

    def export(self) -> Arrays:
        """All that decides later plans."""
        return {**super().export(), **named(_PART, self.ids.export())}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue where `export` was called."""
        saved = Saved(state)
        self.ids.restore(saved.part(_PART), saved.number("iteration"))
        super().restore(state)


class SimulatedPruning(ChunkScheduler):
    """A scheduler that prunes by itself when it is time, without tensors: its pruning goes by accesses.

    Which columns are kept would need gradients, but for what moves it only matters how many. Rows that go
    home to be narrowed are part of the plan after it.
    """

    _sent: tuple[Moves, ...] = ()  # on the way home, not in a plan yet

    def fill(self) -> bool:
        """Read on, over a pruning if it is time for one; false when there is nothing left to plan."""
        while not super().fill():
            if not self.ids.must_wait:
                return False
            layout = self.ids.layout
            if layout.awaits_columns and self.iteration >= layout.pruning.cold_start:
                self._sent += (self.bring_home().moves,)
                self.narrow(layout.settled())
            if self.look():
                self.prune()
        return True

    def plan(self) -> Plan:
        """Decide the next iteration."""
        plan = super().plan()
        if self._sent:
            first, *others = self._sent
            plan, self._sent = replace(plan, moves=first.followed_by(*others, plan.moves)), ()
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
