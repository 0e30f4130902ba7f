"""What the scheduler knows of rows: where they are, who caches them, which exist; plans change it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.arrays import Arrays, Saved, extended, named
from rowhaul.schedule.batch import IdBatch
from rowhaul.schedule.caches import Caches
from rowhaul.schedule.directory import Directory, LocatedBatch
from rowhaul.schedule.directory.slots import UNTRAINED, take_up
from rowhaul.schedule.lifetimes import Forgotten, Lifetimes
from rowhaul.schedule.plan import Plan
from rowhaul.schedule.row_states import State
from rowhaul.schedule.settings import NO_ROWS, HotRows, ScheduleSettings
from rowhaul.schedule.sizes import RowSizes
from rowhaul.schedule.sync import Step, Wiring, make_exchange
from rowhaul.schedule.threads import Threads, bounds

Slots = npt.NDArray[np.int32]
Tables = npt.NDArray[np.int32]
Keys = npt.NDArray[np.int64]

NO_SLOTS: Slots = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Replacement:
    """The rows that enter and leave the replicated set, ordered by (table, key)."""

    entering: HotRows
    states: npt.NDArray[np.uint8]  # entering rows: the state before
    leaving: HotRows


@dataclass(frozen=True)
class PlacedRows:
    """Rows that are not simply at home, ordered by (table, key); good until the next plan."""

    slots: Slots
    owing: npt.NDArray[np.uint64]  # workers that hold updates of a row beyond what its state says

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, some: slice) -> PlacedRows:
        return PlacedRows(self.slots[some], self.owing[some])


class RowTracker:
    """The directory, the workers' caches, the synchronisation mode and the rows' lifetimes, kept in step."""

    def __init__(self, settings: ScheduleSettings, threads: Threads) -> None:
        self._threads = threads
        topology, mode = settings.topology, settings.sync_mode
        self._num_workers = topology.num_workers
        self._num_tables = len(settings.sizes.values)
        self._hot = settings.hot or NO_ROWS
        self._wiring = Wiring(topology, settings.sizes, settings.look_ahead)
        self._exchange = make_exchange(mode, self._wiring, threads)
        self._lifetimes = Lifetimes(settings.row_policies)
        self.directory = Directory(
            first_touch=settings.first_touch, lifetimes=self._lifetimes, threads=threads
        )
        self._in_bytes = settings.cache.unit == "bytes"
        # Record bytes of each slot, where caches count them.
        self._slot_bytes: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._leaving = NO_SLOTS  # slots that may no longer be needed
        cache = settings.cache
        self._caches = (
            Caches(cache.capacities(self._num_workers), cache.unit, cache.policy, threads)
            if mode.caches_rows
            else None
        )
        if len(self._hot):
            pinned, _ = self.directory.pin(self._hot.tables, self._hot.keys, State.REPLICATED)
            self.directory.slots["trained"][pinned] = UNTRAINED  # as all rows are
            self._know(pinned)

    def locate(self, number: int, ids: IdBatch, first: int) -> tuple[LocatedBatch, tuple[Slots, Slots]]:
        """Give the rows of a batch slots; ``first`` is the first batch of the window. See `Directory`."""
        batch, uses = self.directory.locate(number, ids, first)
        self._know(batch.slots[batch.new])
        return batch, uses

    def release(self) -> None:
        """Free the slots of rows that neither the window nor a cache names any more."""
        self.directory.release(self._leaving)
        self._leaving = NO_SLOTS

    def placed(self) -> PlacedRows:
        """The rows that are not simply at home; see `Scheduler.placed`."""
        placed = self.directory.placed_rows()
        return PlacedRows(placed, self._exchange.owing(placed))

    def placed_among(self, tables: Tables, keys: Keys) -> PlacedRows:
        """Those of these rows that may not be simply at home, in the order given."""
        found = self.directory.find(tables, keys)
        return PlacedRows(found, self._exchange.owing(found))

    def states(self, rows: PlacedRows, iteration: int) -> Arrays:
        """The states of some of these rows; see `Scheduler.states`."""
        return self.directory.states(rows.slots, rows.owing, iteration)

    def have_room(self, batch: LocatedBatch, worker: npt.NDArray[np.int32]) -> bool:
        """Whether each cache holds the rows that an assignment gives to its worker; changes nothing."""
        caches, slots = self._caches, batch.slots
        if caches is None or caches.have_room_for_all(slots, self._slot_bytes):
            return True
        states = self.directory.slots["state"][slots]
        is_held = (states != State.REPLICATED) & (states != State.NOT_ADMITTED)
        trainers = batch.found.trainers(worker, self._threads)
        return caches.have_room(slots[is_held], trainers[is_held], self._slot_bytes)

    def carry_out(self, batch: LocatedBatch, worker: npt.NDArray[np.int32], *, count_uses: bool) -> Plan:
        """Turn an assignment into moves, evictions and the states after the iteration.

        ``count_uses``: also count how many samples named each row, for dispatchers that learn.
        """
        slots, number = self.directory.slots, batch.number
        trainers = batch.found.trainers(worker, self._threads)
        edges = bounds(len(batch.slots))
        is_held, is_fresh = (np.empty(len(batch.slots), np.bool_) for _ in range(2))
        most_moves = np.zeros(len(edges) - 1, np.int64)
        appearances, occurrences = (
            (self.directory.appearances, batch.occurrences) if count_uses else (NO_SLOTS, NO_SLOTS)
        )
        self._threads.share(
            lambda counter: take_up(
                slots, number, appearances, batch.slots, batch.next_use, occurrences, trainers, edges,
                counter, is_held, is_fresh, most_moves,
            ),
            len(edges) - 1,
        )  # fmt: skip
        evicted_from, victims = np.zeros(0, np.int16), NO_SLOTS
        if self._caches is None:
            uncached = batch.slots
        else:
            cached, by, uncached = batch.slots, trainers, NO_SLOTS
            if not is_held.all():
                cached, by, uncached = cached[is_held], by[is_held], cached[~is_held]
            evicted_from, victims = self._caches.step(
                number, cached, by, self._kept_by(by), self._slot_bytes, slots["next_use"]
            )
        fresh = np.flatnonzero(is_fresh).astype(np.int32)
        self.directory.remember_trained(batch, fresh)
        outcome = self._exchange.step(
            Step(
                iteration=number,
                slots=slots,
                rows=batch.slots,
                trainers=trainers,
                evicted_from=evicted_from,
                victims=victims,
                edges=edges,
                most_moves=most_moves,
            )
        )
        evicted_tables, evicted_keys = self.directory.names(victims)
        forgotten, emptied = self._forget_due(number, batch.ids.time)
        self._leaving = np.concatenate([uncached, victims, emptied])
        return Plan(
            iteration=number,
            num_workers=self._num_workers,
            worker=worker,
            tables=batch.tables,
            keys=batch.keys,
            trainers=trainers,
            evicted_from=evicted_from,
            evicted_tables=evicted_tables,
            evicted_keys=evicted_keys,
            ids=batch.ids,
            forgotten_tables=forgotten.tables,
            forgotten_keys=forgotten.keys,
            num_expired=forgotten.num_expired,
            **vars(outcome),
        )

    def mark_trained(self, tables: Tables, keys: Keys, iteration: int) -> None:
        """Mark rows as trained before the first plan; see `Scheduler.mark_trained`."""
        self.directory.mark_trained(tables, keys)
        self._lifetimes.know(iteration - 1, tables, keys)
        self._exempt_replicated()

    def recall(self, lifetimes: Saved) -> None:
        """Restore exported lifetimes; see `Scheduler.recall`."""
        self._lifetimes.restore(lifetimes)
        self._exempt_replicated()

    def replicate(self, hot: HotRows, iteration: int) -> Replacement:
        """Replace the replicated rows before an iteration; see `Scheduler.replicate`."""
        entering, leaving = hot.without(self._hot), self._hot.without(hot)
        left, were_trained = self.directory.unpin(leaving.tables, leaving.keys, iteration - 1)
        entered, states = self.directory.pin(entering.tables, entering.keys, State.REPLICATED)
        self._know(entered)
        if self._caches is not None:
            self._caches.drop(entered, self._slot_bytes)
        self._leaving = np.concatenate([self._leaving, left])
        self._lifetimes.know(iteration - 1, *self.directory.names(left[were_trained]))
        self._lifetimes.drop(entering.tables, entering.keys)
        self._hot = hot
        return Replacement(entering, states, leaving)

    def forget(self, tables: Tables, keys: Keys, iteration: int) -> None:
        """Forget rows before an iteration: no rank holds anything of them."""
        self._drop_and_release(self.directory.find(tables, keys), iteration)

    def come_home(self, iteration: int) -> None:
        """Empty all caches before an iteration: every row is at home."""
        self._drop_and_release(self.directory.held_rows(), iteration)

    def resize(self, sizes: RowSizes) -> None:
        """Change the sizes of rows; all must be at home."""
        self.release()
        self._wiring.use(sizes)

    def export(self) -> Arrays:
        """Export everything as plain arrays."""
        self.release()
        slots, rows = self.directory.export()
        return {
            **named("rows", rows),
            **named("caches", self._caches.export(slots) if self._caches is not None else {}),
            **named("exchange", self._exchange.export(slots)),
            **named("lifetimes", self._lifetimes.export()),
            "replicated": self.directory.slots["trained"][self.directory.replicated_rows()],
        }

    def restore(self, saved: Saved) -> None:
        """Restore an exported state into a new tracker."""
        slots = self.directory.restore(saved.part("rows"), self._num_tables, self._num_workers)
        self._know(slots)
        if self._caches is not None:
            self._caches.restore(saved.part("caches"), slots, self._slot_bytes)
        self._exchange.restore(saved.part("exchange"), slots)
        self._lifetimes.restore(saved.part("lifetimes"))
        replicated = self.directory.replicated_rows()
        if "replicated" in saved:
            trained = saved.array("replicated", np.int32, len(replicated))
        else:  # earlier versions saved all replicated rows as trained
            trained = np.zeros(len(replicated), np.int32)
        self.directory.slots["trained"][replicated] = trained

    def _know(self, slots: Slots) -> None:
        """Follow the directory: these slots are new, and all slots may have moved."""
        every: npt.NDArray[Any] = self.directory.slots
        if len(self._slot_bytes) < len(every):
            if self._caches is not None:
                self._caches.use_heads(every["head"])
            self._slot_bytes = extended(self._slot_bytes, len(every))
        if self._in_bytes:
            self._slot_bytes[slots] = self._wiring.record_bytes[every["table"][slots]]

    def _kept_by(self, trainers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The workers whose copies of rows stay worth something when these have trained them."""
        if self._exchange.keeps_split_copies:
            return trainers
        nobody, one = np.uint64(0), np.uint64(1)
        return np.where(trainers & (trainers - one) == nobody, trainers, nobody)

    def _exempt_replicated(self) -> None:
        self._lifetimes.drop(self._hot.tables, self._hot.keys)

    def _forget_due(self, iteration: int, time: int) -> tuple[Forgotten, Slots]:
        """Forget the rows that are due after an iteration; returns them and their slots."""
        forgotten = self._lifetimes.forget(iteration, time)
        if not len(forgotten):
            return forgotten, NO_SLOTS
        slots = self.directory.find(forgotten.tables, forgotten.keys)
        self._drop(slots, iteration)
        return forgotten, slots

    def _drop_and_release(self, slots: Slots, iteration: int) -> None:
        self._drop(slots, iteration - 1)
        self._leaving = np.concatenate([self._leaving, slots])

    def _drop(self, slots: Slots, iteration: int) -> None:
        """Drop everything but the homes' records of rows once an iteration is over."""
        if self._caches is not None:
            self._caches.drop(slots, self._slot_bytes)
        self._exchange.forget(slots)
        self.directory.forget(slots, iteration)
