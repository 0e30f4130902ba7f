"""Describe a batch to the active dispatcher, let it assign the samples, and check its answer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_read
from rowhaul.errors import ConfigError
from rowhaul.schedule.control import ActiveControls
from rowhaul.schedule.directory import Directory, LocatedBatch
from rowhaul.schedule.directory.slots import AHEAD
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.masks import NOBODY, ONE, bit, lowest, trainers_of
from rowhaul.schedule.row_states import HOME, NOT_ADMITTED, OWNED, REPLICATED, SPLIT
from rowhaul.schedule.settings import ScheduleSettings
from rowhaul.schedule.sizes import apportion
from rowhaul.schedule.threads import Threads
from rowhaul.schedule.topology import home_shard

SEEDS = 1 << 62  # kernels take a seed as a signed 64-bit integer
# Of rows that nobody looks at: see `is_blind`.
_NO_MASKS, _NO_RANKS = np.zeros(0, np.uint64), np.zeros(0, np.int16)
_NO_ROWS, _NO_FLAGS, _NO_SIZES = np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(0, np.int64)


class Dispatching:
    """From a batch and the directory to an assignment."""

    def __init__(
        self, settings: ScheduleSettings, directory: Directory, active: ActiveControls, threads: Threads
    ) -> None:
        self._directory = directory
        self._active = active
        self._threads = threads
        self.use(settings)

    def use(self, settings: ScheduleSettings) -> None:
        """Continue with other sizes of rows."""
        self._settings = settings
        sizes = settings.sizes
        self._record_sizes = np.array(sizes.records, np.int64) // sizes.unit
        self._value_sizes = np.array(sizes.values, np.int64) // sizes.unit

    def learn(self, iteration: int, samples_planned: int) -> None:
        """Update a dispatcher that learns before this iteration."""
        learner = self._active.learner
        if learner is None or not learner.learns_at(iteration):
            return
        slots = self._directory.slots
        cached = np.flatnonzero(slots["head"] >= 0)
        samples_per_worker = samples_planned // self._settings.topology.num_workers
        appearances = self._directory.appearances[cached]
        self._active.use(learner.learn(slots["table"][cached], appearances, samples_per_worker))

    def assign(self, batch: LocatedBatch, following: LocatedBatch | None) -> npt.NDArray[np.int32]:
        """The worker of each sample; ``following`` is the next batch, if the window has it."""
        task = self.task(batch)
        far_sighted = self._active.far_sighted
        if far_sighted is None:
            worker = self._active.dispatcher.assign(task)
        else:
            worker = far_sighted.assign_ahead(
                task, lambda one: None if following is None else self._task_after(batch, task, one, following)
            )
        samples = np.bincount(worker, minlength=task.num_workers) if len(worker) else task.capacities * 0
        fits = len(samples) == task.num_workers and bool((samples <= task.capacities).all())
        if len(worker) != task.num_samples or not fits:  # kernels would write beyond their arrays
            raise ConfigError(
                f"the dispatcher {self._active.dispatcher.name} gave the workers {samples.tolist()} "
                f"samples of a batch of {task.num_samples}; their capacities are {task.capacities.tolist()}"
            )
        return worker

    def task(self, batch: LocatedBatch) -> DispatchTask:
        """The task of dividing a batch as the directory stands."""
        topology, is_blind = self._settings.topology, self._active.blind
        nothing = np.zeros(batch.num_samples + 1, np.int64) if is_blind else None
        offsets, rows = batch.by_sample if nothing is None else (nothing, _NO_ROWS)
        latest, owner, partial, free, home, record_size, value_size, next_use = (
            (_NO_MASKS, _NO_RANKS, _NO_MASKS, _NO_FLAGS, _NO_RANKS, _NO_SIZES, _NO_SIZES, batch.next_use)
            if is_blind
            else describe_rows(
                self._directory.slots,
                batch.slots,
                batch.next_use,
                batch.number,
                topology.sharding if topology.colocated else 0,
                topology.peer_to_peer,
                self._record_sizes,
                self._value_sizes,
            )
        )
        return DispatchTask(
            offsets=offsets,
            rows=rows,
            tables=batch.tables,
            latest=latest,
            owner=owner,
            partial=partial,
            free=free,
            home=home,
            record_size=record_size,
            value_size=value_size,
            next_use=next_use,
            prices=self._active.prices,
            capacities=apportion(batch.num_samples, self._active.shares),
            seed=(self._settings.seed * 0x9E3779B1 + batch.number) % SEEDS,
            peer_to_peer=topology.peer_to_peer and not is_blind,
            threads=self._threads,
        )

    def _task_after(
        self, batch: LocatedBatch, task: DispatchTask, worker: npt.NDArray[np.int32], following: LocatedBatch
    ) -> DispatchTask:
        """The next batch's task once this one is trained so; evictions and admissions aside."""
        place = np.empty(len(self._directory.slots), np.int32)
        place[following.slots] = np.arange(len(following.slots), dtype=np.int32)
        shared = np.flatnonzero(batch.next_use == following.number)
        mode, after = self._settings.sync_mode, self.task(following)
        describe_after(
            trainers_of(*batch.by_sample, worker, len(batch.slots)), task.owner,
            task.record_size > task.value_size, self._directory.slots["state"][batch.slots],
            shared, place[batch.slots[shared]],
            mode.name == "on-demand", mode.name != "static", mode.staleness > 0,
            self._settings.topology.peer_to_peer, after.latest, after.owner, after.partial, after.free,
        )  # fmt: skip
        return after


@kernel
def describe_rows(slots, batch_slots, next_use, number, num_shards, peer_to_peer, record_sizes, value_sizes):
    """Describe a batch's rows to a dispatcher; ``num_shards`` is 0 where no worker stores rows.

    Returns latest, owner, partial, free, home, record_size, value_size and next_use of `DispatchTask`.
    """
    count = len(batch_slots)
    latest = np.empty(count, np.uint64)
    owner = np.empty(count, np.int16)
    partial = np.empty(count, np.uint64)
    free = np.empty(count, np.uint8)
    home = np.empty(count, np.int16)
    record_size = np.empty(count, np.int64)
    value_size = np.empty(count, np.int64)
    until_next_use = np.empty(count, np.int32)
    slots_address = np.int64(slots.ctypes.data)
    for r in range(count):
        if r + AHEAD < count:
            prefetch_to_read(slots_address + np.int64(batch_slots[r + AHEAD]) * slots.itemsize)
        record = slots[batch_slots[r]]
        table, state, members = record.table, record.state, record.members
        latest[r] = NOBODY
        owner[r] = -1
        partial[r] = NOBODY
        free[r] = 0
        if state == HOME:
            latest[r] = members
        elif state == OWNED:
            latest[r] = members
            owner[r] = lowest(members)
        elif state == SPLIT:
            partial[r] = members
            if peer_to_peer and record.settled == NOBODY and record.base != NOBODY:
                # One of the workers will gather the gradients and own the row.
                owner[r] = lowest(members & record.base)
                latest[r] = bit(owner[r])
        else:
            free[r] = 1
        home[r] = home_shard(table, record.key, num_shards) if num_shards > 0 else -1
        record_size[r] = record_sizes[table]
        value_size[r] = value_sizes[table]
        until_next_use[r] = next_use[r] - number if next_use[r] > 0 else 0
    return latest, owner, partial, free, home, record_size, value_size, until_next_use


@kernel
def describe_after(
    trainers, owner, has_state, states, shared, places, on_demand, keeps_copies, bounded, peer_to_peer,
    next_latest, next_owner, next_partial, next_free,
):  # fmt: skip
    """Update the second batch's description for rows that the first, once trained, shares with it.

    ``shared`` are the rows of the first batch that the second needs too, ``places`` their places there.
    """
    for s in range(len(shared)):
        r, place = shared[s], places[s]
        if states[r] == REPLICATED or states[r] == NOT_ADMITTED:
            continue
        by = trainers[r]
        single = by & (by - ONE) == NOBODY
        next_free[place] = 0
        next_owner[place] = -1
        next_partial[place] = NOBODY
        if bounded:
            next_latest[place] |= by
        else:
            next_latest[place] = by if keeps_copies and single else NOBODY
        if on_demand:
            if single:
                next_owner[place] = lowest(by)
            else:
                next_partial[place] = by
                if peer_to_peer and owner[r] >= 0:
                    # The record from before the step is on a peer, which will gather the gradients.
                    trains = has_state[r] and by & bit(owner[r]) != NOBODY
                    next_owner[place] = owner[r] if trains else lowest(by)
                    next_latest[place] = bit(next_owner[place])
