"""The scheduler: from a stream of id batches to one plan an iteration.

Every rank runs it on the same ids with the same settings and control records and gets the same
plans, so that nothing but row payloads has to cross the wire. It reads no clock and draws nothing
that the seed does not decide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError, DataError
from rowhaul.schedule.active_controls import ActiveControls
from rowhaul.schedule.batch import IdBatch
from rowhaul.schedule.caches import Caches
from rowhaul.schedule.control import ControlRecord, Value
from rowhaul.schedule.directory import Directory, LocatedBatch, State
from rowhaul.schedule.directory.slot_kernels import link_uses
from rowhaul.schedule.dispatching import Dispatching
from rowhaul.schedule.growing import extended
from rowhaul.schedule.lifetimes import Forgotten, Lifetimes
from rowhaul.schedule.masks import trainers_of
from rowhaul.schedule.origin import check_origin, check_window, origin
from rowhaul.schedule.plan import Plan
from rowhaul.schedule.replication import NO_ROWS, Replacement, difference
from rowhaul.schedule.row_states import row_states
from rowhaul.schedule.saved import Arrays, Saved, named
from rowhaul.schedule.settings import HotRows, ScheduleSettings
from rowhaul.schedule.sizes import RowSizes
from rowhaul.schedule.sync import Step, Wiring, make_exchange
from rowhaul.schedule.sync.move_kernels import take_up

NO_EVICTIONS = np.zeros(0, np.int16), np.zeros(0, np.int32)


class Scheduler:
    """Plans iterations one after the other.

    Example:
        >>> from rowhaul.schedule import CacheSettings, IdBatch, RowSizes, ScheduleSettings, Topology
        >>> settings = ScheduleSettings(
        ...     topology=Topology(num_workers=2), sizes=RowSizes(values=(64,), state=(0,)),
        ...     prices=(1, 10), cache=CacheSettings(capacity=4), dispatcher="esd:1", first_touch=False)
        >>> ids = IdBatch.from_features([0], np.array([7, 7, 8, 8]), np.ones((1, 4), np.int32))
        >>> scheduler = Scheduler(settings, [ids, ids])
        >>> while scheduler.fill():
        ...     plan = scheduler.plan()
        ...     print(plan.worker, len(plan.moves))
        [0 0 1 1] 2
        [0 0 1 1] 0
    """

    def __init__(self, settings: ScheduleSettings, batches: Iterable[IdBatch]) -> None:
        self.settings = settings
        self.iteration = 0  # the next one to plan
        self._first = 0  # the first one that it plans
        topology, sizes = settings.topology, settings.sizes
        self._source: Iterator[IdBatch] = iter(batches)
        self._exhausted = False
        self._window: deque[LocatedBatch] = deque()
        self._samples_planned = 0
        self._failed = False
        self._leaving = NO_EVICTIONS[1]  # slots that may not be needed any more
        self._active = ActiveControls(settings)
        mode = settings.sync_mode
        self._wiring = Wiring(topology, sizes, settings.look_ahead)
        self._exchange = make_exchange(mode, self._wiring)
        self._slot_bytes: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # record bytes of each slot
        self._lifetimes = Lifetimes(settings.row_policies)
        self._directory = Directory(first_touch=settings.first_touch, lifetimes=self._lifetimes)
        self._dispatching = Dispatching(settings, self._directory, self._active)
        self._caches = (
            Caches(
                settings.cache.capacities(topology.num_workers), settings.cache.unit, settings.cache.policy
            )
            if mode.caches_rows
            else None
        )
        if settings.hot is not None:
            pinned, _ = self._directory.pin(settings.hot.tables, settings.hot.keys, State.REPLICATED)
            self._know(pinned)

    def fill(self) -> bool:
        """Read batches until the window is full; false when there is nothing left to plan.

        This is where the ids' source is waited for and rows are looked up; `plan` never waits.
        """
        self._release()  # here, where it delays no plan
        while not self._exhausted and len(self._window) <= self.settings.look_ahead:
            ids = next(self._source, None)
            if ids is None:
                self._exhausted = True
            else:
                self._take_in(ids)
        return bool(self._window)

    def post(self, name: str, value: Value) -> ControlRecord:
        """Decide a control record now, after the last plan; it is in force two iterations later."""
        return self._active.post(name, value, next_iteration=self.iteration)

    def receive(self, record: ControlRecord) -> None:
        """Take a control record that another rank has posted; one that is refused changes nothing."""
        self._active.receive(record, next_iteration=self.iteration)

    def plan(self) -> Plan:
        """Decide the next iteration; call `fill` before."""
        if self._failed:
            raise DataError("planning has failed before and cannot go on; make a new scheduler")
        if not self._window:
            raise DataError("there is no batch to plan: fill() was not called, or said that all are planned")
        self._failed = True  # unless this one succeeds: half of an iteration may have been carried out
        controls = self._active.advance(self.iteration)
        batch = self._window.popleft()
        num_admitted = self._directory.admit(batch)
        self._dispatching.learn(self.iteration, self._samples_planned)
        worker = self._dispatching.assign(batch, self._window[0] if self._window else None)
        plan = self._carry_out(batch, worker, controls, num_admitted)
        self.iteration += 1
        self._samples_planned += batch.num_samples
        self._failed = False
        return plan

    def states(self) -> dict[str, npt.NDArray[Any]]:
        """The rows that are not simply at home, by (table, key), between two iterations.

        Masks have bit j for worker j: ``latest`` holds the record, ``partial`` owes a gradient, ``settled``
        has handed it in, ``base`` holds the record from before the step (with bounded staleness: any copy).
        ``trained`` is the iteration that the gradients of a SPLIT row are from (with bounded staleness: the
        last one, where updates wait), -1 of all others. Rows not named are at home without a copy, or were
        never trained.
        """
        return row_states(self._directory, self._exchange, self.iteration)

    def go_on_at(self, iteration: int, next_record: int) -> None:
        """Before the first plan: count iterations and control records on from an earlier scheduler's."""
        if self.iteration > 0:
            raise ConfigError(f"a scheduler cannot begin anew: it has made {self.iteration} plans")
        self.iteration = self._first = iteration
        self._active.go_on_at(next_record)

    def mark_trained(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        """Before the first plan: these rows have been trained before; they are at home, and admitted.

        To rows of tables that forget it is as if the iteration before had named them, if nothing else is
        known of them (see `recall`).
        """
        self._check_beginning("rows can be marked as trained")
        rows = IdBatch(np.array([0, len(keys)]), tables, keys)
        self._check(rows)
        self._directory.mark_trained(rows.tables, rows.keys)
        self._lifetimes.know(self.iteration - 1, rows.tables, rows.keys)
        self._exempt_replicated()

    def recall(self, lifetimes: Mapping[str, npt.NDArray[Any]]) -> None:
        """Before the first plan: know of rows what another scheduler, or one process, has exported of theirs.

        Policies may be others: see `Lifetimes.restore`.
        """
        self._check_beginning("what is known of rows can be restored")
        self._lifetimes.restore(Saved(lifetimes))
        self._exempt_replicated()

    def _check_beginning(self, what: str) -> None:
        if self.iteration > self._first:
            made = self.iteration - self._first
            raise ConfigError(f"{what} before the first plan; {made} are made")

    def _exempt_replicated(self) -> None:
        if self.settings.hot is not None:
            self._lifetimes.drop(self.settings.hot.tables, self.settings.hot.keys)

    def replicate(self, hot: HotRows) -> Replacement:
        """Between two plans: from now on these rows, and no others, are replicated.

        Whoever carries plans out brings the rows there; those that enter are admitted, those that leave are
        at home afterwards. See `rowhaul.runtime.hot_set`.
        """
        if self._failed or self.settings.sync_mode.name == "bounded":
            raise ConfigError(
                "replicated rows can be exchanged where planning goes on, and rows are exact; not after an "
                "error, and not with sync: bounded"
            )
        before = self.settings.hot or NO_ROWS
        entering, leaving = difference(hot, before), difference(before, hot)
        left = self._directory.unpin(leaving.tables, leaving.keys, self.iteration - 1)
        entered, states = self._directory.pin(entering.tables, entering.keys, State.REPLICATED)
        self._know(entered)
        if self._caches is not None:
            self._caches.drop(entered, self._slot_bytes)
        self._leaving = np.concatenate([self._leaving, left])
        self._lifetimes.know(self.iteration - 1, leaving.tables, leaving.keys)
        self._lifetimes.drop(entering.tables, entering.keys)
        self.settings = replace(self.settings, hot=hot if len(hot) else None)
        return Replacement(entering, states, leaving)

    def forget(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        """Between two plans: nobody has anything of these rows any more; go on reading, if that had ended.

        Whoever carries plans out drops them.
        """
        slots = self._directory.find(tables, keys)
        self._drop(slots, self.iteration - 1)
        self._leaving = np.concatenate([self._leaving, slots])
        self._exhausted = False

    def resize(self, sizes: RowSizes) -> None:
        """Between two plans, with all rows at home and no batch in the window: rows have other sizes.

        Goes on reading, if that had ended.
        """
        if self._window:
            raise ConfigError("rows cannot have other sizes while batches are in the window")
        self._release()
        self.settings = replace(self.settings, sizes=sizes)
        self._wiring.use(sizes)
        self._dispatching.use(self.settings)
        self._exhausted = False

    def come_home(self) -> None:
        """Between two plans: all rows are at home from now on, and no cache holds any.

        Whoever carries plans out has brought them there: see `rowhaul.pruning.cluster.homecoming`.
        """
        slots = self._directory.held_rows()
        self._drop(slots, self.iteration - 1)
        self._leaving = np.concatenate([self._leaving, slots])

    def export(self) -> Arrays:
        """All that decides later plans, besides settings and ids, as plain arrays: see `restore`.

        To be called between two plans; it may follow `fill`, and planning goes on as if nothing had been.
        """
        if self._failed:
            raise DataError("planning has failed, so that there is no state to go on from")
        self._release()
        slots, rows = self._directory.export()
        return {
            **origin(self.settings, [batch.ids for batch in self._window]),
            "iteration": np.array([self.iteration]),
            "samples_planned": np.array([self._samples_planned]),
            **named("rows", rows),
            **named("caches", self._caches.export(slots) if self._caches is not None else {}),
            **named("exchange", self._exchange.export(slots)),
            **named("in_force", self._active.export()),
            **named("lifetimes", self._lifetimes.export()),
        }

    def restore(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on where `export` was called: the plans to come are the same, bit for bit.

        This scheduler must be new, with equal settings, and its batches must begin with the first one that
        was not planned then. The window is filled again from them.
        """
        if self.iteration > 0 or self._window or self._exhausted:
            raise ConfigError(
                "a state can be restored before anything is read or planned; make a new scheduler"
            )
        saved = Saved(state)
        check_origin(saved, self.settings)
        self._failed = True  # unless all goes well: half of a state may have been restored
        self.iteration, self._samples_planned = saved.number("iteration"), saved.number("samples_planned")
        topology = self.settings.topology
        slots = self._directory.restore(
            saved.part("rows"), len(self.settings.sizes.values), topology.num_workers
        )
        self._know(slots)
        if self._caches is not None:
            self._caches.restore(saved.part("caches"), slots, self._slot_bytes)
        self._exchange.restore(saved.part("exchange"), slots)
        self._active.restore(saved.part("in_force"))
        self._lifetimes.restore(saved.part("lifetimes"))
        self._first = self.iteration
        self.fill()
        check_window(saved, [batch.ids for batch in self._window], self.iteration)
        self._failed = False

    def _check(self, batch: IdBatch) -> None:
        num_tables, given = len(self.settings.sizes.values), batch.by_feature
        if given is not None and given.is_simple and (given.tables < num_tables).all():
            return
        if len(batch.tables) and not 0 <= batch.tables.min() <= batch.tables.max() < num_tables:
            raise DataError(
                f"a batch names tables {batch.tables.min()} to {batch.tables.max()}, but sizes are given for "
                f"{num_tables} tables (0 to {num_tables - 1})"
            )

    def _release(self) -> None:
        self._directory.release(self._leaving)
        self._leaving = NO_EVICTIONS[1]

    def _take_in(self, ids: IdBatch) -> None:
        """Put a batch into the window, and link each row's use to its use before."""
        self._check(ids)
        number = self.iteration + len(self._window)
        batch, (named_by, place) = self._directory.locate(number, ids, self.iteration)
        self._know(batch.slots[batch.new])
        for earlier in self._window:
            link_uses(named_by, place, earlier.number, earlier.next_use, number)
        self._window.append(batch)

    def _know(self, slots: npt.NDArray[np.int32]) -> None:
        """Keep up with the directory: these slots are new, and all slots may have moved."""
        every = self._directory.slots
        if len(self._slot_bytes) < len(every):
            if self._caches is not None:
                self._caches.use_heads(every["head"])
            self._slot_bytes = extended(self._slot_bytes, len(every))
        self._slot_bytes[slots] = self._wiring.record_bytes[every["table"][slots]]

    def _carry_out(
        self,
        batch: LocatedBatch,
        worker: npt.NDArray[np.int32],
        controls: tuple[ControlRecord, ...],
        num_admitted: int,
    ) -> Plan:
        """Phase an assignment into moves, evictions and the states after the iteration."""
        slots = self._directory.slots
        trainers = trainers_of(batch.offsets, batch.rows, worker, len(batch.slots))
        cached, by, current, uncached, fresh, most_moves = take_up(
            slots,
            self._directory.appearances if self._active.learner is not None else NO_EVICTIONS[1],
            batch.slots,
            batch.next_use,
            batch.occurrences,
            trainers,
            self._exchange.keeps_split_copies,
        )
        evicted_from, victims = NO_EVICTIONS
        if self._caches is None:
            uncached = batch.slots
        else:
            evictions = self._caches.step(
                batch.number, cached, by, current, self._slot_bytes, slots["next_use"]
            )
            evicted_from, victims = evictions.workers, evictions.slots
        self._directory.remember_trained(batch, fresh)
        outcome = self._exchange.step(
            Step(
                iteration=batch.number,
                slots=slots,
                rows=batch.slots,
                trainers=trainers,
                evicted_from=evicted_from,
                victims=victims,
                most_moves=most_moves + len(victims),
            )
        )
        evicted_tables, evicted_keys = self._directory.names(victims)
        forgotten, emptied = self._forget(batch.number)
        plan = Plan(
            iteration=batch.number,
            num_workers=self.settings.topology.num_workers,
            worker=worker,
            tables=batch.tables,
            keys=batch.keys,
            trainers=trainers,
            states=outcome.states,
            moves=outcome.moves,
            local_moves=outcome.local_moves,
            steps=outcome.steps,
            lookups=outcome.lookups,
            hits=outcome.hits,
            all_reduce_rows=outcome.all_reduce_rows,
            all_reduce_bytes=outcome.all_reduce_bytes,
            evicted_from=evicted_from,
            evicted_tables=evicted_tables,
            evicted_keys=evicted_keys,
            controls=controls,
            ids=batch.ids,
            forgotten_tables=forgotten.tables,
            forgotten_keys=forgotten.keys,
            num_expired=forgotten.num_expired,
            num_admitted=num_admitted,
            move_rows=outcome.move_rows,
            local_move_rows=outcome.local_move_rows,
            step_rows=outcome.step_rows,
        )
        self._leaving = np.concatenate([uncached, victims, emptied])
        return plan

    def _forget(self, iteration: int) -> tuple[Forgotten, npt.NDArray[np.int32]]:
        """Forget the rows that are due: nobody has anything of them then. Returns them, and their slots."""
        forgotten = self._lifetimes.forget(iteration)
        if not len(forgotten):
            return forgotten, NO_EVICTIONS[1]
        slots = self._directory.find(forgotten.tables, forgotten.keys)
        self._drop(slots, iteration)
        return forgotten, slots

    def _drop(self, slots: npt.NDArray[np.int32], iteration: int) -> None:
        """Nobody but homes has anything of these rows once an iteration is over."""
        if self._caches is not None:
            self._caches.drop(slots, self._slot_bytes)
        self._exchange.forget(slots)
        self._directory.forget(slots, iteration)
