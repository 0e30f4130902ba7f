"""The scheduler: from a stream of id batches to one plan an iteration.

Every rank runs it on the same ids with the same settings and control records and gets the same
plans, so that nothing but row payloads has to cross the wire. It reads no clock and draws nothing
that the seed does not decide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError, DataError
from rowhaul.schedule.apportion import apportion
from rowhaul.schedule.batch import IdBatch
from rowhaul.schedule.caches import Caches
from rowhaul.schedule.control import ControlLog, ControlRecord, Value
from rowhaul.schedule.directory import Directory, LocatedBatch, State
from rowhaul.schedule.dispatch import make_dispatcher, with_settings
from rowhaul.schedule.dispatch.task import Dispatcher, DispatchTask, Learns, LooksAhead
from rowhaul.schedule.growing import extended
from rowhaul.schedule.masks import trainers_of
from rowhaul.schedule.plan import Plan
from rowhaul.schedule.settings import ScheduleSettings, check_prices, check_shares
from rowhaul.schedule.sync import Step, Wiring, make_exchange
from rowhaul.schedule.sync.kernels import take_up
from rowhaul.schedule.tasks import TaskBuilder

NO_EVICTIONS = np.zeros(0, np.int16), np.zeros(0, np.int32)
SEEDS = 1 << 62  # kernels take a seed as a signed 64-bit integer


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
        topology, sizes = settings.topology, settings.sizes
        self._source: Iterator[IdBatch] = iter(batches)
        self._exhausted = False
        self._window: deque[LocatedBatch] = deque()
        self._samples_planned = 0
        self._failed = False
        self._leaving = NO_EVICTIONS[1]  # slots that may not be needed any more
        self._controls = ControlLog()
        dispatcher = settings.dispatcher
        self._use(make_dispatcher(dispatcher) if isinstance(dispatcher, str) else dispatcher)
        self._prices = np.array(settings.prices, np.int64)
        self._shares = list(settings.shares or [1] * topology.num_workers)
        mode = settings.sync_mode
        self._wiring = Wiring(topology, sizes, settings.look_ahead)
        self._exchange = make_exchange(mode, self._wiring)
        self._slot_bytes: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # record bytes of each slot
        self._tasks = TaskBuilder(topology, sizes)
        self._directory = Directory(first_touch=settings.first_touch, admit_after=settings.admit_after)
        if settings.hot is not None:
            self._directory.pin(settings.hot.tables, settings.hot.keys, State.REPLICATED)
        self._caches = (
            Caches(
                settings.cache.capacities(topology.num_workers), settings.cache.unit, settings.cache.policy
            )
            if mode.caches_rows
            else None
        )

    def fill(self) -> bool:
        """Read batches until the window is full; false when there is nothing left to plan.

        This is where the ids' source is waited for and rows are looked up; `plan` never waits.
        """
        self._directory.release(self._leaving)  # here, where it delays no plan
        self._leaving = NO_EVICTIONS[1]
        while not self._exhausted and len(self._window) <= self.settings.look_ahead:
            ids = next(self._source, None)
            if ids is None:
                self._exhausted = True
            else:
                self._take_in(ids)
        return bool(self._window)

    def post(self, name: str, value: Value) -> ControlRecord:
        """Decide a control record now, after the last plan; it is in force two iterations later."""
        record = self._controls.next(name, value, during=self.iteration - 1)
        self.receive(record)
        return record

    def receive(self, record: ControlRecord) -> None:
        """Take a control record that another rank has posted; one that is refused changes nothing."""
        self._check_control(record)
        self._controls.add(record, next_iteration=self.iteration)

    def plan(self) -> Plan:
        """Decide the next iteration; call `fill` before."""
        if self._failed:
            raise DataError("planning has failed before and cannot go on; make a new scheduler")
        if not self._window:
            raise DataError("there is no batch to plan: fill() was not called, or said that all are planned")
        self._failed = True  # unless this one succeeds: half of an iteration may have been carried out
        controls = self._controls.due(self.iteration)
        for record in controls:
            self._apply(record)
        batch = self._window.popleft()
        self._directory.admit(batch)
        self._let_dispatcher_learn()
        worker = self._assign(batch)
        plan = self._carry_out(batch, worker, tuple(controls))
        self.iteration += 1
        self._samples_planned += batch.num_samples
        self._failed = False
        return plan

    def states(self) -> dict[str, npt.NDArray[Any]]:
        """The rows known to the directory between two iterations, by (table, key), with their masks.

        All others are at home, or fresh if they were never trained.
        """
        rows = self._directory.known_rows()
        split = rows["state"] == State.SPLIT
        nobody = np.uint64(0)
        return {
            "tables": rows["table"],
            "keys": rows["key"],
            "state": rows["state"],
            "latest": np.where(split, nobody, rows["members"]),
            "partial": np.where(split, rows["members"], nobody),
            "settled": rows["settled"],
            "base": rows["base"],
        }

    def _check(self, batch: IdBatch) -> None:
        num_tables = len(self.settings.sizes.values)
        if len(batch.tables) and not 0 <= batch.tables.min() <= batch.tables.max() < num_tables:
            raise DataError(
                f"a batch names tables {batch.tables.min()} to {batch.tables.max()}, but sizes are given for "
                f"{num_tables} tables (0 to {num_tables - 1})"
            )

    def _check_control(self, record: ControlRecord) -> None:
        num_workers = self.settings.topology.num_workers
        if record.name == "dispatcher":
            make_dispatcher(str(record.value))
        elif record.name == "prices":
            check_prices(record.numbers, num_workers)
        elif record.name == "shares":
            check_shares(record.numbers, num_workers)
        else:
            before = [one.value for one in self._controls.waiting if one.name == "dispatcher"]
            dispatcher = make_dispatcher(str(before[-1])) if before else self._dispatcher
            with_settings(dispatcher, **{record.name: record.value})

    def _apply(self, record: ControlRecord) -> None:
        if record.name == "dispatcher":
            self._use(make_dispatcher(str(record.value)))
        elif record.name == "prices":
            self._prices = np.array(record.numbers, np.int64)
        elif record.name == "shares":
            self._shares = list(record.numbers)
        else:
            self._use(with_settings(self._dispatcher, **{record.name: record.value}))

    def _take_in(self, ids: IdBatch) -> None:
        """Put a batch into the window, and link each row's use to its use before."""
        self._check(ids)
        number = self.iteration + len(self._window)
        batch, previous = self._directory.locate(number, ids)
        slots = self._directory.slots
        if len(self._slot_bytes) < len(slots):
            if self._caches is not None:
                self._caches.use_heads(slots["head"])
            self._slot_bytes = extended(self._slot_bytes, len(slots))
        self._slot_bytes[batch.slots] = self._wiring.record_bytes[batch.tables]
        in_window = previous[0] >= self.iteration
        slots["next_use"][batch.slots[~in_window]] = number
        for earlier in self._window:
            here = previous[0] == earlier.number
            earlier.next_use[previous[1][here]] = number
        self._window.append(batch)

    def _use(self, dispatcher: Dispatcher) -> None:
        # Asked once, here: it takes Python longer than some dispatchers need for a batch.
        self._dispatcher = dispatcher
        self._learner = dispatcher if isinstance(dispatcher, Learns) else None
        self._far_sighted = dispatcher if isinstance(dispatcher, LooksAhead) else None

    def _let_dispatcher_learn(self) -> None:
        if self._learner is None or not self._learner.learns_at(self.iteration):
            return
        slots = self._directory.slots
        cached = np.flatnonzero(slots["head"] >= 0)
        samples_per_worker = self._samples_planned // len(self._shares)
        self._use(
            self._learner.learn(
                slots["table"][cached], self._directory.appearances[cached], samples_per_worker
            )
        )

    def _task(self, batch: LocatedBatch) -> DispatchTask:
        capacities = apportion(batch.num_samples, self._shares)
        seed = (self.settings.seed * 0x9E3779B1 + batch.number) % SEEDS
        return self._tasks.build(self._directory, batch, self._prices, capacities, seed)

    def _assign(self, batch: LocatedBatch) -> npt.NDArray[np.int32]:
        task = self._task(batch)
        if self._far_sighted is None:
            worker = self._dispatcher.assign(task)
        else:
            worker = self._far_sighted.assign_ahead(task, lambda one: self._task_after(batch, task, one))
        samples = np.bincount(worker, minlength=task.num_workers) if len(worker) else task.capacities * 0
        fits = len(samples) == task.num_workers and bool((samples <= task.capacities).all())
        if len(worker) != task.num_samples or not fits:  # kernels would write beyond their arrays
            raise ConfigError(
                f"the dispatcher {self._dispatcher.name} gave the workers {samples.tolist()} samples of a "
                f"batch of {task.num_samples}; their capacities are {task.capacities.tolist()}"
            )
        return worker

    def _task_after(
        self, batch: LocatedBatch, task: DispatchTask, worker: npt.NDArray[np.int32]
    ) -> DispatchTask | None:
        """The task of the next batch as if this one were trained so; evictions and admissions aside."""
        if not self._window:
            return None
        following = self._window[0]
        place = np.empty(len(self._directory.slots), np.int32)
        place[following.slots] = np.arange(len(following.slots), dtype=np.int32)
        shared = np.flatnonzero(batch.next_use == following.number)
        trainers = trainers_of(batch.offsets, batch.rows, worker, len(batch.slots))
        return self._tasks.after(
            task,
            trainers,
            self._directory.slots["state"][batch.slots],
            self.settings.sync_mode,
            self._task(following),
            shared,
            place[batch.slots[shared]],
        )

    def _carry_out(
        self, batch: LocatedBatch, worker: npt.NDArray[np.int32], controls: tuple[ControlRecord, ...]
    ) -> Plan:
        """Turn an assignment into moves, evictions and the states after the iteration."""
        slots = self._directory.slots
        trainers = trainers_of(batch.offsets, batch.rows, worker, len(batch.slots))
        cached, by, current, uncached, most_moves = take_up(
            slots,
            self._directory.appearances if self._learner is not None else NO_EVICTIONS[1],
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
        self._directory.remember_trained(batch)
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
        )
        self._leaving = np.concatenate([uncached, victims])
        return plan
