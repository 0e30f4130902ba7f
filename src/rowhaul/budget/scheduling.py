"""A scheduler of rows within a budget: ids come in, the rows that they read are planned.

Rows do not change hands between two stops, so batches are read no further ahead than the next one. Their new
ids take empty slots when they are read, and they are counted when they are planned, both in order. A saved
state is that before the batches of the window: what their ids took is left out of it, and taken again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.budget.layout import SlotLayout, check_schedule
from rowhaul.budget.maps import Batch, SlotMaps
from rowhaul.budget.slots import HandOver
from rowhaul.runtime.flush import flush_plan
from rowhaul.runtime.hot_set import replacing_plan
from rowhaul.schedule import HotRows, IdBatch, Moves, Plan, Scheduler, ScheduleSettings
from rowhaul.schedule.arrays import Arrays, Saved, named
from rowhaul.schedule.directory.distinct import distinct_by_appearance
from rowhaul.schedule.plan import Kind, Payload
from rowhaul.schedule.settings import NO_ROWS
from rowhaul.schedule.topology import homes_of

MAPS = "slots"  # the part of a saved state that is not bound to a cluster


class SlotIds:
    """Batches of rows up to the next stop, and again after it.

    Args:
        layout: of the tables.
        batches: ids.
    """

    def __init__(self, layout: SlotLayout, batches: Iterator[IdBatch]) -> None:
        self.layout, self.maps = layout, layout.make_maps()
        self._batches = batches
        self._unplanned: deque[Batch] = deque()
        self.next_batch = 0  # the number of the batch that is read next
        self._changed_at = 0  # iterations before rows changed hands last

    def __iter__(self) -> SlotIds:
        return self

    def __next__(self) -> IdBatch:
        if self.must_wait:
            raise StopIteration
        return self.read(next(self._batches))

    @property
    def must_wait(self) -> bool:
        """Whether rows change hands before the next batch is read."""
        return self.next_batch >= self.layout.budget.next_stop(self._changed_at)

    def read(self, ids: IdBatch) -> IdBatch:
        """Name the rows that the next batch reads, once its new ids have the slots that are empty."""
        given = ids.by_feature
        if given is None:
            tables, keys = ids.tables, ids.keys
        else:  # feature by feature, as workers have their samples
            tables, keys = np.repeat(given.tables, given.counts), given.values
        named_by, distinct, starts, counts = distinct_by_appearance(tables, keys, len(self.layout.specs))
        batch = self.maps.find(distinct, starts, counts, seat=True)
        self._unplanned.append(batch)
        self.next_batch += 1
        rows = batch.rows[named_by]
        if given is None:
            return IdBatch(ids.offsets, ids.tables, rows)
        return IdBatch.from_features(given.tables.tolist(), rows, given.lengths)

    def count_next(self) -> None:
        """Count the accesses of the next batch to be planned."""
        self.maps.count(self._unplanned.popleft())

    def finding(self) -> tuple[npt.NDArray[Any], ...]:
        """What finds rows before the next batch to be planned, copied."""
        return tuple(array.copy() for array in self.maps.finding(self._unplanned))

    def state(self) -> Arrays:
        """The maps before the next batch to be planned, copied."""
        return {name: array.copy() for name, array in self.maps.state(self._unplanned).items()}

    def change(self, now: int) -> HandOver:
        """After ``now`` steps: decide which rows change hands, and read on."""
        self._changed_at = now
        return self.maps.change(now)

    def start_at(self, iteration: int) -> None:
        """Read batches from this one on."""
        self.next_batch = self._changed_at = iteration


class SlotScheduler(Scheduler):
    """Plans what moves of rows within a budget.

    Args:
        settings: for rows as the layout has them.
        layout: of the tables.
        batches: ids.
    """

    def __init__(self, settings: ScheduleSettings, layout: SlotLayout, batches: Iterable[IdBatch]) -> None:
        check_schedule(settings, layout)
        self.ids = SlotIds(layout, iter(batches))
        self._change: HandOver | None = None  # decided, not carried out yet
        super().__init__(settings, self.ids)

    @property
    def maps(self) -> SlotMaps:
        """Who has which row."""
        return self.ids.maps

    def plan(self) -> Plan:
        """Plan the next iteration."""
        plan = super().plan()
        self.ids.count_next()
        return plan

    def decide(self) -> Plan:
        """At a stop, between two plans: decide which rows change hands; only the maps change.

        The plan's rows are those that begin, and it carries the row that each is a copy of; its forgotten
        rows are those that end.
        """
        self._exhausted = False
        self._change = change = self.ids.change(self.iteration)
        return replace(
            self.nothing(),
            tables=change.tables,
            keys=change.rows,
            carried=(change.sources,),
            forgotten_tables=change.gone_tables,
            forgotten_keys=change.gone_rows,
        )

    def hand_over(self) -> Plan:
        """After `decide`, when no replicated row changes hands: what brings new rows their values.

        First sources are flushed to copies at their homes; then, as second moves, these send them to the
        homes of the new rows. From now on rows that end are forgotten, those that begin are at their homes.
        """
        change, self._change = self._change, None
        assert change is not None
        plan = _source_plan(self, change)
        for rows in ((change.gone_tables, change.gone_rows), (change.tables, change.rows)):
            self.forget(*rows)
        self.begin_at_home(change.tables, change.rows)
        return plan

    def nothing(self, carried: tuple[npt.NDArray[Any], ...] = ()) -> Plan:
        """A plan of no iteration and without moves, to share what else there is."""
        nowhere = self.states_of(np.zeros(0, np.int32), np.zeros(0, np.int64))
        return replace(flush_plan(nowhere, self.settings.topology, self.settings.sizes), carried=carried)

    def go_on_at(self, iteration: int, next_record: int) -> None:
        """Before the first plan: count on from an earlier scheduler's."""
        super().go_on_at(iteration, next_record)
        self.ids.start_at(iteration)

    def export(self) -> Arrays:
        """All that decides later plans."""
        return {**super().export(), **named(MAPS, self.ids.state())}

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue where `export` was called."""
        prefix = f"{MAPS}."
        self.maps.load_state(
            {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
        )
        self.ids.start_at(Saved(state).number("iteration"))
        super().restore(state)


class SimulatedBudget(SlotScheduler):
    """A scheduler that hands rows over by itself, without tensors.

    What that moves is part of the plan after it.
    """

    _sent: tuple[Moves, ...] = ()  # not in a plan yet

    def fill(self) -> bool:
        """Read on, over a stop if it is time for one; false when there is nothing left to plan."""
        while not super().fill():
            if not self.ids.must_wait:
                return False
            change = self.decide()
            staying = staying_hot(self.settings.hot, change)
            if staying is not None:
                self._sent += (replacing_plan(self, staying).moves,)
            self._sent += (self.hand_over().moves,)
        return True

    def plan(self) -> Plan:
        """Decide the next iteration."""
        plan = super().plan()
        if self._sent:
            first, *others = self._sent
            plan, self._sent = replace(plan, moves=first.followed_by(*others, plan.moves)), ()
        return plan


def staying_hot(hot: HotRows | None, change: Plan) -> HotRows | None:
    """Return the replicated rows that a `SlotScheduler.decide` leaves alone; None: all of them."""
    if hot is None or not len(hot):
        return None
    assert change.forgotten_tables is not None
    assert change.forgotten_keys is not None
    changing = HotRows(
        np.concatenate([change.tables, change.forgotten_tables]),
        np.concatenate([change.keys, change.forgotten_keys]),
    )
    staying = hot.without(changing)
    return staying if len(staying) < len(hot.without(NO_ROWS)) else None


def rows_read(layout: SlotLayout, batches: Iterable[IdBatch]) -> list[IdBatch]:
    """The rows that batches read once these batches have decided who has a slot."""
    batches, ids = list(batches), SlotIds(layout, iter(()))
    for one in batches:
        ids.read(one)
        ids.count_next()
    ids.maps.change(layout.budget.next_stop(len(batches)))
    return [ids.read(one) for one in batches]


def _source_plan(scheduler: Scheduler, change: HandOver) -> Plan:
    """Plan to flush the sources of new rows, and to send each once to every home that needs it."""
    topology, sizes = scheduler.settings.topology, scheduler.settings.sizes
    targets = homes_of(change.tables, change.rows, topology)
    needed = np.unique(np.stack([change.tables, change.sources, targets], axis=1).astype(np.int64), axis=0)
    tables, sources = needed[:, 0].astype(np.int32), needed[:, 1]
    first = np.ones(len(needed), np.bool_)
    first[1:] = (needed[1:, :2] != needed[:-1, :2]).any(axis=1)
    flushing = flush_plan(scheduler.states_of(tables[first], sources[first]), topology, sizes)
    sending = Moves(
        np.full(len(needed), Kind.PEER_SEND, np.uint8),
        np.full(len(needed), Payload.VALUES, np.uint8),
        tables,
        sources,
        homes_of(tables, sources, topology),
        needed[:, 2].astype(np.int16),
        np.array(sizes.values, np.int64)[tables],
        np.zeros(len(needed), np.int32),
        np.zeros(len(needed), np.uint8),
        np.ones(len(needed), np.uint8),  # second: after the flush
    )
    local = sending.source == sending.target
    assert flushing.local_moves is not None
    return replace(
        flushing,
        tables=change.tables,
        keys=change.rows,
        trainers=np.zeros(len(change.rows), np.uint64),
        states=np.zeros(len(change.rows), np.uint8),
        moves=flushing.moves.followed_by(sending.some(~local)),
        local_moves=flushing.local_moves.followed_by(sending.some(local)),
        carried=(change.sources,),
        forgotten_tables=change.gone_tables,
        forgotten_keys=change.gone_rows,
    )
