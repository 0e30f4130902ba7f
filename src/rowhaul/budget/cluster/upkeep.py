"""Rows that change hands on a cluster, between two segments: all ranks call it together.

Every host's leader has the maps, read from the same ids, and decides by itself: the same as the others, and
as one process. What new rows begin with is brought to their homes as a plan says: their sources, wherever
their latest values are, are flushed to copies, and sent once to every home that needs them. Nothing else
moves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.budget.cluster.copies import CopiedSlots
from rowhaul.budget.layout import SlotLayout
from rowhaul.budget.maps import SlotMaps
from rowhaul.budget.scheduling import SlotScheduler, staying_hot
from rowhaul.nn.features import FeatureGroup
from rowhaul.runtime.flush import flush
from rowhaul.runtime.layout import CopiedRows, MaintainedTraining, Upkeep
from rowhaul.runtime.lookups import FlushedRows, Rows
from rowhaul.runtime.mover import Mover
from rowhaul.runtime.phases import Payloads, RankPhases
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.runtime.runtime import Runtime
from rowhaul.schedule import Moves, Plan, Scheduler, Topology, homes_of
from rowhaul.schedule.directory.row_index import RowIndex
from rowhaul.schedule.phases import Phase
from rowhaul.store.keyed import copy_in

_FIRST_NOTE = 10  # steps before the first note; the next ones come each time steps have doubled


@dataclass
class HandOverNote:
    """What changed hands at some stops; the same on all ranks, but for the seconds."""

    iteration: int = 0  # of the last stop
    num_stops: int = 0
    num_begun: int = 0  # rows
    num_ended: int = 0
    num_bytes: int = 0  # sent between ranks
    seconds: float = 0.0

    def text(self) -> str:
        """A line for the log."""
        return (
            f"rows changed hands {self.num_stops:,} times up to step {self.iteration:,}: {self.num_begun:,} "
            f"began, {self.num_ended:,} ended; {self.num_bytes:,} bytes were sent "
            f"({self.seconds * 1e3:.0f} ms)"
        )


class ClusterBudget(Upkeep):
    """The part of one rank in what a budget does between segments."""

    def __init__(self, layout: SlotLayout) -> None:
        self.layout: SlotLayout = layout
        self.note = HandOverNote()  # of the stops since the last one that was logged
        self._next_note = _FIRST_NOTE
        self._maps: SlotMaps | None = None  # to find rows that are only read
        self._maps_of = -1  # the iteration that these maps find rows before

    def until_next(self, iteration: int) -> int:
        """Iterations before rows change hands next; at least one."""
        return self.layout.budget.next_stop(iteration) - iteration

    def run(self, training: MaintainedTraining) -> list[HandOverNote]:
        """Hand rows over; a collective call, at a stop."""
        began, runtime, note = time.perf_counter(), training.runtime, self.note
        change = runtime.feed.share(lambda scheduler: _budgeted(scheduler).decide())
        if len(change.keys) or change.num_forgotten:
            staying = staying_hot(training.settings.hot, change)
            if staying is not None:
                note.num_bytes += int(training.replicate(staying).moves.num_bytes.sum())
            plan = runtime.feed.share(lambda scheduler: _budgeted(scheduler).hand_over())
            note.num_bytes += int(plan.moves.num_bytes.sum())
            topology, rates = training.settings.topology, training.rates
            runtime.in_moves(partial(hand_over, plan=plan, topology=topology, rates=rates)).wait()
        note.iteration, note.num_stops = runtime.iteration, note.num_stops + 1
        note.num_begun += len(change.keys)
        note.num_ended += change.num_forgotten
        note.seconds += time.perf_counter() - began
        if note.iteration < self._next_note:
            return []
        self.note, self._next_note = HandOverNote(), 2 * note.iteration
        return [note]

    def prepare_copies(self, runtime: Runtime) -> None:
        """Bring the maps from the leaders to all ranks, unless they are there already; collective."""
        if self._maps is not None and self._maps_of == runtime.iteration:
            return
        plan = runtime.feed.share(_with_maps)
        self._maps, self._maps_of = self._maps or self.layout.make_maps(), runtime.iteration
        self._maps.find_as(plan.carried)

    def copied_rows(self, groups: Sequence[FeatureGroup]) -> CopiedRows:
        """Make a row source for rows that are only read; after `prepare_copies`."""
        assert self._maps is not None
        return CopiedSlots(groups, self.layout, self._maps)


def _budgeted(scheduler: Scheduler) -> SlotScheduler:
    assert isinstance(scheduler, SlotScheduler)
    return scheduler


def _with_maps(scheduler: Scheduler) -> Plan:
    return _budgeted(scheduler).nothing(_budgeted(scheduler).ids.finding())


def hand_over(mover: Mover, plan: Plan, topology: Topology, rates: Rates) -> None:
    """Carry out `SlotScheduler.hand_over` on one rank; all ranks call it together."""
    home, (flushing, sending) = mover.home, _flushing_and_sending(plan)
    copies = None if home is None else RowMemory(home.layout)
    flush(mover, flushing, rates, copies)
    phases = RankPhases(sending, mover.rank)
    sent, received = phases.sent(Phase.LATE_SECOND), phases.received(Phase.LATE_SECOND)
    values = np.empty(0, np.uint8)
    if home is not None and copies is not None:
        values = FlushedRows(home, copies).look_up(_rows_of(phases, sent))[1]
    arrived = mover.swap(sent, received, values)
    mover.wait_sent()
    assert plan.forgotten_tables is not None
    assert plan.forgotten_keys is not None
    for memory in (mover.cache, home):
        if memory is not None:
            memory.forget(plan.forgotten_tables, plan.forgotten_keys)
            memory.forget(plan.tables, plan.keys)  # a row that was hot before anybody had it
    if home is not None:
        here = homes_of(plan.tables, plan.keys, topology) == mover.rank
        given = _places_among(_rows_of(phases, received), plan.tables[here], plan.carried[0][here])
        new = Rows(plan.tables[here].astype(np.int64), plan.keys[here])
        _begin(home, new, received.offsets[given], arrived)


def _flushing_and_sending(plan: Plan) -> tuple[Plan, Plan]:
    """Divide a plan into what homes receive first, and what they send to each other then."""
    assert plan.local_moves is not None
    rows: dict[str, Any] = {
        name: getattr(plan, name)[:0] for name in ("tables", "keys", "trainers", "states")
    }
    parts = []
    for second in (False, True):
        moves, local = (_of_phase(one, second=second) for one in (plan.moves, plan.local_moves))
        steps = None if second else plan.steps
        parts.append(replace(plan, moves=moves, local_moves=local, steps=steps, carried=(), **rows))
    return parts[0], parts[1]


def _of_phase(moves: Moves, *, second: bool) -> Moves:
    return moves.some((moves.second != 0) == second)


def _rows_of(phases: RankPhases, payloads: Payloads) -> Rows:
    return Rows(phases.tables[payloads.row].astype(np.int64), phases.keys[payloads.row])


def _places_among(
    rows: Rows, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """Where some of these rows are among them; they may be asked for more than once."""
    index = RowIndex()
    index.reserve(len(rows))
    index.add(rows.tables.astype(np.int32), rows.keys, np.arange(len(rows)))
    return index.find(tables, keys)


def _begin(home: RowMemory, new: Rows, offsets: npt.NDArray[np.int64], values: npt.NDArray[np.uint8]) -> None:
    """Make rows with the values at these offsets, and with fresh optimizer state."""
    value_bytes, _ = home.sizes
    for number, places, positions in home.by_group(new.tables):
        group = home.groups[number]
        locations = group.make_fresh(positions, new.keys[places])
        copy_in(group, locations, value_bytes[new.tables[places]], offsets[places], values)
