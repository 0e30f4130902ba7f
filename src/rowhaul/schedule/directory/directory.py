"""Where the latest version of every row is: the state that all ranks keep alike.

Only rows that a cache holds or the window names have a record here (a *slot*, 64 bytes). All other
rows are at home, or fresh if they were never trained, which a compact filter remembers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError
from rowhaul.schedule.arrays import Arrays, Saved, extended, extended_stack, named
from rowhaul.schedule.batch import IdBatch
from rowhaul.schedule.directory.by_feature import RowsByFeature, find_rows
from rowhaul.schedule.directory.distinct import RowsBySample, distinct_rows
from rowhaul.schedule.directory.row_index import RowIndex
from rowhaul.schedule.directory.seen import SeenRows
from rowhaul.schedule.directory.slots import (
    NEVER,
    SLOT,
    UNTRAINED,
    locate_slots,
    make_slots,
    name_rows,
    release_slots,
    set_state,
)
from rowhaul.schedule.lifetimes.policy import Status
from rowhaul.schedule.row_states import State
from rowhaul.schedule.threads import Threads, bounds

if TYPE_CHECKING:
    from rowhaul.schedule.lifetimes import Lifetimes

FIRST_SLOTS = 1024
NO_WINDOW = -(1 << 31)  # before all batches
PINNED, RESTORED = -2, -3  # stamps of rows that no batch has named; see also `NEVER`
# The fields of a slot that are saved; the others follow from the window.
_SAVED: dict[str, type[np.generic]] = {
    "state": np.uint8,
    "members": np.uint64,
    "settled": np.uint64,
    "base": np.uint64,
    "touched": np.int32,
    "trained": np.int32,
}


@dataclass
class LocatedBatch:
    """A batch in the window, its rows named by slots."""

    number: int
    found: RowsByFeature | RowsBySample  # which rows its ids name
    slots: npt.NDArray[np.int32]  # the distinct rows, ordered by (table, key)
    next_use: npt.NDArray[np.int32]  # distinct rows: the next batch of the window that names each, or 0
    new: npt.NDArray[np.int32]  # index into `slots`: the rows that had none before
    num_full_filters: int  # of rows ever seen, when it was located: its fresh rows are in none of them
    ids: IdBatch

    @property
    def num_samples(self) -> int:
        """Samples in the batch."""
        return len(self.ids)

    @property
    def tables(self) -> npt.NDArray[np.int32]:
        """Distinct rows: the table of each."""
        return self.found.tables

    @property
    def keys(self) -> npt.NDArray[np.int64]:
        """Distinct rows: the key of each."""
        return self.found.keys

    @cached_property
    def by_sample(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Samples + 1 offsets, and the rows of each sample as indices into `slots`, a row once."""
        return self.found.by_sample()

    @cached_property
    def occurrences(self) -> npt.NDArray[np.int32]:
        """Distinct rows: samples that name each."""
        return self.found.occurrences()


class Directory:
    """Row states, and the slots they live in.

    Args:
        first_touch: rows never trained are FRESH; otherwise they are at home, too.
        lifetimes: admits and forgets rows of tables with policies; their rows are FRESH when admitted.
        threads: find the rows of batches.
    """

    def __init__(
        self, *, first_touch: bool, lifetimes: Lifetimes | None = None, threads: Threads | None = None
    ) -> None:
        self._threads = threads or Threads()
        self.slots: npt.NDArray[Any] = np.zeros(0, SLOT)
        self.appearances: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # slots: samples that named each
        self.first_touch = first_touch
        self._index = RowIndex()
        self._free: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._num_free = 0
        self._lifetimes = lifetimes if lifetimes is not None and lifetimes.has_policy.any() else None
        self._seen = SeenRows(self._threads) if first_touch else None
        self._reserve(FIRST_SLOTS)

    @property
    def num_rows(self) -> int:
        """Rows that have a slot."""
        return len(self.slots) - self._num_free

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes that grow with cached rows, and bytes that grow with all rows ever seen."""
        return {
            "slots": self.slots.nbytes + self._free.nbytes + self._index.places.nbytes,
            "seen": self._seen.memory_bytes if self._seen else 0,
            "lifetimes": self._lifetimes.memory_bytes if self._lifetimes else 0,
        }

    def names(self, slots: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The tables and keys of the rows in these slots."""
        tables, keys, edges = (
            np.empty(len(slots), np.int32),
            np.empty(len(slots), np.int64),
            bounds(len(slots)),
        )
        self._threads.share(
            lambda counter: name_rows(self.slots, slots, edges, counter, tables, keys), len(edges) - 1
        )
        return tables, keys

    def locate(
        self, number: int, batch: IdBatch, window_begins: int = NO_WINDOW
    ) -> tuple[LocatedBatch, tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """Give every row of a batch a slot.

        Rows that no batch since ``window_begins`` has named are used next in this one. Returns the batch and,
        for each distinct row, the earlier batch that named it last and its place there, from which the
        window links the uses of a row.
        """
        given = batch.by_feature
        found: RowsByFeature | RowsBySample
        if given is not None and given.is_simple:
            found = find_rows(given, self._threads)
        else:
            found = RowsBySample(*distinct_rows(batch.offsets, batch.tables, batch.keys))
        tables, keys, count = found.tables, found.keys, len(found.keys)
        self._reserve(count)
        slots, previous_batch, previous_local = (np.empty(count, np.int32) for _ in range(3))
        index, edges = self._index.places, bounds(count)
        self._threads.share(
            lambda counter: locate_slots(
                tables, keys, index, self.slots, number, window_begins, edges, counter,
                slots, previous_batch, previous_local,
            ),
            len(edges) - 1,
        )  # fmt: skip
        new, self._num_free = make_slots(
            tables, keys, index, self.slots, self._free, self._num_free, number, window_begins,
            slots, previous_batch,
        )  # fmt: skip
        new_slots = slots[new]
        self.appearances[new_slots] = 0
        if self._seen is not None:
            unseen = ~self._seen.contains(tables[new], keys[new])
            if self._lifetimes is not None:
                unseen &= ~self._lifetimes.has_policy[tables[new]]  # of these `admit` decides
            set_state(self.slots, new_slots[unseen], np.uint8(State.FRESH))
        next_use = np.zeros(count, np.int32)
        num_full = 0 if self._seen is None else self._seen.num_full
        located = LocatedBatch(number, found, slots, next_use, new, num_full, batch)
        return located, (previous_batch, previous_local)

    def admit(self, batch: LocatedBatch) -> int:
        """Mark which rows of a batch the tables' policies admit; returns how many are admitted with it."""
        if self._lifetimes is None:
            return 0
        subject = np.flatnonzero(self.slots["state"][batch.slots] != State.REPLICATED)
        status = self._lifetimes.see(
            batch.number, batch.tables[subject], batch.keys[subject], batch.occurrences[subject]
        )
        slots = batch.slots[subject]
        admitted = status == Status.ADMITTED
        begins = State.FRESH if self.first_touch else State.HOME
        set_state(self.slots, slots[status == Status.WAITING], np.uint8(State.NOT_ADMITTED))
        set_state(self.slots, slots[admitted], np.uint8(begins))
        return int(admitted.sum())

    def find(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The slots of those of these rows that have one."""
        slots = self._index.find(tables, keys)
        return slots[slots >= 0]

    def forget(self, slots: npt.NDArray[np.int32], iteration: int) -> None:
        """Reset rows to untrained after an iteration; no cache may hold copies of them."""
        for name in ("members", "settled", "base"):
            self.slots[name][slots] = 0
        self.slots["state"][slots] = State.HOME
        self.slots["touched"][slots] = iteration  # ranks drop what they hold of them when it ends

    def remember_trained(self, batch: LocatedBatch, fresh: npt.NDArray[np.int32]) -> None:
        """Remember that the fresh rows of a batch are trained from now on."""
        if self._seen is not None:
            if self._lifetimes is not None:
                fresh = fresh[~self._lifetimes.has_policy[batch.tables[fresh]]]
            self._seen.add(batch.tables[fresh], batch.keys[fresh], batch.num_full_filters)

    def pin(
        self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64], state: State
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Give rows a state, and a slot, that they keep until they are unpinned.

        Returns the slots, ordered by (table, key), and the states before.
        """
        offsets = np.array([0, len(keys)], np.int64)
        batch, named = self.locate(PINNED, IdBatch(offsets, tables, keys))
        known = named[0] != NEVER
        self.slots["stamp"][batch.slots[known]] = named[0][known]  # the window needs to know who named them
        self.slots["local"][batch.slots[known]] = named[1][known]
        before = self.slots["state"][batch.slots]
        for name in ("members", "settled", "base"):
            self.slots[name][batch.slots] = 0
        self.slots["state"][batch.slots] = state
        if state == State.REPLICATED:
            if self._lifetimes is not None and self.first_touch:  # then slots do not say what is fresh
                unknown = self._lifetimes.has_policy[batch.tables]
                unknown &= ~self._lifetimes.knows(batch.tables, batch.keys) & (before == State.HOME)
                before[unknown] = State.FRESH
            is_new = np.isin(before, (State.FRESH, State.NOT_ADMITTED))
            self.slots["trained"][batch.slots] = np.where(is_new, UNTRAINED, 0)
        return batch.slots, before

    def unpin(
        self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64], touched: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Turn pinned rows into ordinary ones, last touched in iteration ``touched``.

        Returns their slots, and which were ever trained: those are at home, the others fresh.
        """
        slots, _ = self.pin(tables, keys, State.HOME)
        is_trained = self.slots["trained"][slots] != UNTRAINED
        self.slots["window"][slots] -= 2  # once for each time that they were pinned
        self.slots["touched"][slots] = touched
        self.appearances[slots] = 0
        if self._seen is not None:
            self.slots["state"][slots[~is_trained]] = State.FRESH
            self._seen.add(*self.names(slots[is_trained]))
        return slots, is_trained

    def release(self, candidates: npt.NDArray[np.int32]) -> None:
        """Free the slots of candidates that neither the window nor a cache names."""
        self._num_free = release_slots(self.slots, candidates, self._index.places, self._free, self._num_free)

    def mark_trained(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        """Mark rows as trained before the first iteration: they are at home, or replicated."""
        known = self.find(tables, keys)
        self.slots["trained"][known[self.slots["state"][known] == State.REPLICATED]] = 0
        if self._seen is None:
            return  # no row is fresh
        self._seen.add(tables, keys)
        fresh = self.slots["state"] == State.FRESH
        unknown = np.flatnonzero(fresh & (self.slots["stamp"] != NEVER)).astype(np.int32)
        self.slots["state"][unknown[self._seen.contains(*self.names(unknown))]] = State.HOME

    def placed_rows(self) -> npt.NDArray[np.int32]:
        """The slots of rows that are not simply at home, without a copy, ordered by (table, key)."""
        slots = self.slots
        placed = (slots["state"] != State.HOME) | (slots["members"] != 0) | (slots["base"] != 0)
        return self._ordered(placed & (slots["stamp"] != NEVER))

    def states(self, placed: npt.NDArray[np.int32], owing: npt.NDArray[np.uint64], iteration: int) -> Arrays:
        """The states of `placed_rows` before an iteration; see `Scheduler.states`.

        ``owing`` are the workers that hold updates of each row beyond what its state says.
        """
        rows = {name: self.slots[name][placed] for name in ("state", "members", "settled", "base", "trained")}
        tables, keys = self.names(placed)
        split, nobody = rows["state"] == State.SPLIT, np.uint64(0)
        tells = split | (rows["state"] == State.REPLICATED)
        trained = np.where(owing != nobody, np.int32(iteration - 1), np.int32(-1))
        return {
            "tables": tables,
            "keys": keys,
            "state": rows["state"],
            "latest": np.where(split, nobody, rows["members"]),
            "partial": np.where(split, rows["members"], owing),
            "settled": rows["settled"],
            "base": rows["base"],
            "trained": np.where(tells, rows["trained"], trained),
        }

    def held_rows(self) -> npt.NDArray[np.int32]:
        """The slots of rows that some rank may hold a part of, except replicated ones."""
        known = self.slots["stamp"] != NEVER
        elsewhere = (State.FRESH, State.NOT_ADMITTED, State.REPLICATED)
        return np.flatnonzero(known & ~np.isin(self.slots["state"], elsewhere)).astype(np.int32)

    def export(self) -> tuple[npt.NDArray[np.int32], Arrays]:
        """Export all rows but the pinned ones, and the filter of earlier rows, as plain arrays.

        Also returns the slots of the exported rows, ordered by (table, key).
        """
        slots = self._ordered((self.slots["stamp"] != NEVER) & (self.slots["state"] != State.REPLICATED))
        arrays = {name: self.slots[name][slots] for name in ("table", "key", *_SAVED)}
        arrays["trained"][arrays["state"] != State.SPLIT] = -1  # meaningless in other states
        arrays["appearances"] = self.appearances[slots]
        if self._seen is not None:
            arrays |= named("seen", self._seen.export())
        return slots, arrays

    def restore(self, saved: Saved, num_tables: int, num_workers: int) -> npt.NDArray[np.int32]:
        """Restore an exported directory; returns the slots in the same order.

        This one must hold nothing but pinned rows. The window is not restored.
        """
        tables = saved.array("table", np.int32, below=num_tables)
        keys = saved.array("key", np.int64, len(tables))
        batch, _ = self.locate(RESTORED, IdBatch(np.array([0, len(keys)]), tables, keys))
        if not (np.array_equal(batch.tables, tables) and np.array_equal(batch.keys, keys)):
            raise CheckpointError("the saved state of the scheduler is damaged: its rows are not in order")
        limits = {"state": len(State), **dict.fromkeys(("members", "settled", "base"), 1 << num_workers)}
        for name, dtype in _SAVED.items():
            self.slots[name][batch.slots] = saved.array(name, dtype, len(keys), below=limits.get(name))
        self.slots["window"][batch.slots] = 0
        self.appearances[batch.slots] = saved.array("appearances", np.int32, len(keys))
        if self._seen is not None:
            self._seen.restore(saved.part("seen"))
        return batch.slots

    def replicated_rows(self) -> npt.NDArray[np.int32]:
        """The slots of replicated rows, ordered by (table, key)."""
        return self._ordered((self.slots["stamp"] != NEVER) & (self.slots["state"] == State.REPLICATED))

    def _ordered(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
        slots = np.flatnonzero(chosen).astype(np.int32)
        _, places, *_ = distinct_rows(np.array([0, len(slots)]), *self.names(slots))
        ordered = np.empty_like(slots)
        ordered[places] = slots
        return ordered

    def _reserve(self, more: int) -> None:
        if more > self._num_free:
            old = len(self.slots)
            total = max(old + old // 2, old + more)
            self.slots = extended(self.slots, total)
            self.slots["stamp"][old:] = NEVER
            self.slots["head"][old:] = -1
            self.appearances = extended(self.appearances, total)
            self._free = extended_stack(self._free, self._num_free, total)
            self._num_free += total - old
        self._index.reserve(self.num_rows + more)
