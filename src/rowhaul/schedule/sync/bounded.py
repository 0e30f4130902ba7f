"""Bounded staleness, as HET has it: copies may lag, and updates may wait, up to a bound (inexact).

Rows have a version at the home, the number of updates applied there. A copy knows the version it
has seen and how many of its updates wait. A pull brings the whole record, because a copy steps
by itself, with the row's own optimizer state; a push brings the sum of the gradients that waited.
The home adds up, in rank order, what comes of one row before the training of an iteration, and
again what comes after it, and makes one step of each sum. So with a bound of 0 this is full
synchronisation, and exact. In this mode a slot's ``members`` are the workers whose copy is fresh
enough, and ``base`` all that have a copy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.schedule.arrays import Arrays, Saved, extended, extended_stack
from rowhaul.schedule.directory.row_index import RowIndex, index_delete, index_find, index_set, index_value
from rowhaul.schedule.masks import NOBODY, ONE, bit, lowest
from rowhaul.schedule.row_states import FRESH, HOME, NOT_ADMITTED, REPLICATED
from rowhaul.schedule.sync.exchange import Outcome, Step, SyncMode, Wiring
from rowhaul.schedule.sync.moves import (
    AFTER,
    EVICT_PUSH,
    FIRST,
    GRADIENT,
    MISS_PULL,
    RECORD,
    SECOND,
    UPDATE_PUSH,
    Notebook,
    emit,
    mark_moves,
)
from rowhaul.schedule.topology import home_shard

FIRST_COPIES = 1024


class BoundedExchange:
    """What each copy has seen, and the updates that wait in it."""

    def __init__(self, mode: SyncMode, wiring: Wiring) -> None:
        self.keeps_split_copies = mode.staleness > 0
        self._staleness = mode.staleness
        self._wiring = wiring
        self._notebook = Notebook()
        self._index = RowIndex()  # (worker, slot) -> copy
        self._seen: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._pending: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._free: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._num_free = 0
        self._versions: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # slots

    def step(self, step: Step) -> Outcome:
        """Plan the moves of one iteration and bring the states to its end."""
        most_moves = int(step.most_moves.sum()) + len(step.victims)
        self._reserve(len(step.slots), most_moves)
        wiring = self._wiring
        self._notebook.make_room(most_moves, 0)
        moves = self._notebook.moves
        states = np.empty(len(step.rows), np.uint8)
        lookups = np.zeros(wiring.num_workers, np.int64)
        hits = np.zeros(wiring.num_workers, np.int64)
        count, replicated_rows, replicated_bytes, self._num_free = refresh(
            step.slots, step.rows, step.trainers, self._index.places, self._seen, self._pending,
            self._free, self._num_free, self._versions, wiring.value_bytes, wiring.state_bytes,
            wiring.summed_bytes, wiring.first_store, wiring.num_shards, step.iteration, wiring.look_ahead,
            moves, lookups, hits, states,
        )  # fmt: skip
        count, self._num_free = drop(
            step.slots, step.evicted_from, step.victims, self._index.places, self._seen, self._pending,
            self._free, self._num_free, self._versions, self._staleness, wiring.value_bytes,
            wiring.first_store, wiring.num_shards, step.iteration, moves, count,
        )  # fmt: skip
        count = hand_in(
            step.slots, step.rows, step.trainers, self._index.places, self._seen, self._pending,
            self._versions, self._staleness, wiring.value_bytes, wiring.first_store, wiring.num_shards,
            step.iteration, moves, count,
        )  # fmt: skip
        mark_moves(moves, self._notebook.ranks, count)
        beginning = np.zeros(1, np.int64)
        moves_between, local_moves, *_ = self._notebook.moves_written(
            beginning, np.array([count]), wiring.colocated
        )
        steps, _ = self._notebook.steps_written(beginning, beginning)
        return Outcome(
            moves=moves_between,
            local_moves=local_moves,
            steps=steps,  # none: the home steps whenever gradients come
            states=states,
            lookups=lookups,
            hits=hits,
            all_reduce_rows=int(replicated_rows),
            all_reduce_bytes=int(replicated_bytes),
        )

    def owing(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        """See `Exchange`."""
        workers, copied, copies = self._index.items()
        waits = self._pending[copies] > 0
        masks = np.zeros(int(max(slots.max(initial=-1), copied.max(initial=-1))) + 1, np.uint64)
        np.bitwise_or.at(masks, copied[waits], np.uint64(1) << workers[waits].astype(np.uint64))
        return masks[slots]

    def forget(self, slots: npt.NDArray[np.int32]) -> None:
        """See `Exchange`."""
        num_free = self._num_free
        for worker in range(self._wiring.num_workers):
            num_free = forget(worker, slots, self._index.places, self._free, num_free)
        self._num_free = num_free

    def export(self, slots: npt.NDArray[np.int32]) -> Arrays:
        """See `Exchange`."""
        workers, copied, copies = self._index.items()
        place = np.zeros(int(slots.max(initial=-1)) + 1, np.int32)
        place[slots] = np.arange(len(slots), dtype=np.int32)
        rows = place[copied]
        versions = np.zeros(len(slots), np.int32)  # of a row without a copy nobody remembers it
        versions[rows] = self._versions[copied]
        order = np.lexsort((workers, rows))
        return {
            "rows": rows[order],
            "workers": workers[order],
            "seen": self._seen[copies[order]],
            "pending": self._pending[copies[order]],
            "versions": versions,
        }

    def restore(self, saved: Saved, slots: npt.NDArray[np.int32]) -> None:
        """See `Exchange`."""
        rows = saved.array("rows", np.int32, below=len(slots))
        workers = saved.array("workers", np.int32, len(rows), below=self._wiring.num_workers)
        self._reserve(int(slots.max(initial=-1)) + 1, len(rows))
        self._num_free -= len(rows)
        copies = self._free[self._num_free : self._num_free + len(rows)]
        self._seen[copies] = saved.array("seen", np.int32, len(rows))
        self._pending[copies] = saved.array("pending", np.int32, len(rows))
        self._index.add(workers, slots[rows].astype(np.int64), copies.astype(np.int64))
        self._versions[slots] = saved.array("versions", np.int32, len(slots))

    def _reserve(self, num_slots: int, most: int) -> None:
        if len(self._versions) < num_slots:
            self._versions = extended(self._versions, num_slots)
        if self._num_free < most:
            old = len(self._seen)
            total = max(FIRST_COPIES, 2 * old, old + most)
            self._seen, self._pending = extended(self._seen, total), extended(self._pending, total)
            self._free = extended_stack(self._free, self._num_free, total)
            self._num_free += total - old
        self._index.reserve(len(self._seen) - self._num_free + most)


@kernel
def copy_of(index, worker, slot):
    """The number of a worker's copy."""
    return index_value(index[index_find(index, worker, slot), 1])


@kernel
def count_fresh_enough(record, slot, index, seen, versions, staleness):
    """Set a record's members: the copies that the home is not too far ahead of."""
    record.members = NOBODY
    rest = record.base
    while rest != NOBODY:
        w = lowest(rest)
        if versions[slot] - seen[copy_of(index, w, slot)] <= staleness:
            record.members |= bit(w)
        rest &= rest - ONE


@kernel
def refresh(
    slots, batch_slots, trainers, index, seen, pending, free, num_free, versions,
    value_bytes, state_bytes, summed_bytes, first_store, num_shards, iteration, look_ahead, moves, lookups,
    hits, states,
):  # fmt: skip
    """Before training: stale copies push their waiting updates and are pulled again."""
    count = np.int64(0)
    replicated_rows = 0
    replicated_bytes = np.int64(0)
    for r in range(len(batch_slots)):
        slot = batch_slots[r]
        record = slots[slot]
        by = trainers[r]
        states[r] = record.state
        rest = by
        while rest != NOBODY:
            w = lowest(rest)
            lookups[w] += 1
            if record.state == REPLICATED or (record.state == HOME and record.members & bit(w) != NOBODY):
                hits[w] += 1
            rest &= rest - ONE
        values, state = value_bytes[record.table], state_bytes[record.table]
        if record.state == REPLICATED:
            replicated_rows += 1
            replicated_bytes += summed_bytes[record.table]
        if record.state == REPLICATED or record.state == NOT_ADMITTED:
            continue
        if record.base == NOBODY:
            versions[slot] = 0  # no copy remembers another one
        home = first_store + home_shard(record.table, record.key, num_shards)
        ready = min(iteration, max(record.touched + 1, iteration - look_ahead, 0))
        phase = FIRST
        rest = by & record.base & ~record.members
        while rest != NOBODY:
            w = lowest(rest)
            copy = copy_of(index, w, slot)
            if pending[copy] > 0:
                count = emit(moves, count, UPDATE_PUSH, GRADIENT, record, w, home, values, iteration, FIRST)
                versions[slot] += pending[copy]
                pending[copy] = 0
                ready, phase = iteration, SECOND  # what is pulled has this update in it
            rest &= rest - ONE
        rest = by & ~record.members
        while rest != NOBODY:
            w = lowest(rest)
            if record.state != FRESH:
                count = emit(moves, count, MISS_PULL, RECORD, record, home, w, values + state, ready, phase)
            place = index_find(index, w, slot)
            if index[place, 1] == 0:
                num_free -= 1
                index_set(index, place, w, slot, free[num_free])
                pending[free[num_free]] = 0
            seen[index_value(index[place, 1])] = versions[slot]
            rest &= rest - ONE
        record.base |= by
        record.state = HOME
        record.touched = iteration
    return count, replicated_rows, replicated_bytes, num_free


@kernel
def drop(
    slots, evicted_from, victims, index, seen, pending, free, num_free, versions, staleness,
    value_bytes, first_store, num_shards, iteration, moves, count,
):  # fmt: skip
    """Evictions: a copy pushes its waiting updates before it is dropped."""
    for e in range(len(victims)):
        slot, w = victims[e], np.int64(evicted_from[e])
        record = slots[slot]
        record.touched = iteration
        place = index_find(index, w, slot)
        copy = index_value(index[place, 1])
        if pending[copy] > 0:
            home = first_store + home_shard(record.table, record.key, num_shards)
            count = emit(
                moves,
                count,
                EVICT_PUSH,
                GRADIENT,
                record,
                w,
                home,
                value_bytes[record.table],
                iteration,
                FIRST,
            )
            versions[slot] += pending[copy]
        index_delete(index, place)
        free[num_free] = copy
        num_free += 1
        record.base &= ~bit(w)
        count_fresh_enough(record, slot, index, seen, versions, staleness)
    return count, num_free


@kernel
def forget(worker, slots, index, free, num_free):
    """Give up a worker's copies of rows, and what waits in them; returns the free copies."""
    for slot in slots:
        place = index_find(index, worker, slot)
        if index[place, 1] != 0:
            free[num_free] = index_value(index[place, 1])
            num_free += 1
            index_delete(index, place)
    return num_free


@kernel
def hand_in(
    slots, batch_slots, trainers, index, seen, pending, versions, staleness,
    value_bytes, first_store, num_shards, iteration, moves, count,
):  # fmt: skip
    """After training: every trainer has one more update; those with too many push them."""
    for r in range(len(batch_slots)):
        slot = batch_slots[r]
        record = slots[slot]
        if record.state == REPLICATED or record.state == NOT_ADMITTED:
            continue
        home = first_store + home_shard(record.table, record.key, num_shards)
        rest = trainers[r]
        while rest != NOBODY:
            w = lowest(rest)
            copy = copy_of(index, w, slot)
            pending[copy] += 1
            if pending[copy] > staleness:
                values = value_bytes[record.table]
                count = emit(moves, count, UPDATE_PUSH, GRADIENT, record, w, home, values, iteration, AFTER)
                versions[slot] += pending[copy]
                seen[copy] += pending[copy]
                pending[copy] = 0
            rest &= rest - ONE
        count_fresh_enough(record, slot, index, seen, versions, staleness)
    return count
