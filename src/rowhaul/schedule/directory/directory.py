"""Where the latest version of every row is: the state that all ranks keep alike.

Only rows that a cache holds or the window names have a record here (a *slot*, 64 bytes). All other
rows are at home, or fresh if they were never trained, which a compact filter remembers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError
from rowhaul.schedule.batch import IdBatch
from rowhaul.schedule.directory import slot_kernels as kernels
from rowhaul.schedule.directory.distinct_kernels import distinct_by_feature, distinct_rows
from rowhaul.schedule.directory.index import RowIndex
from rowhaul.schedule.directory.seen import SeenRows
from rowhaul.schedule.directory.states import State
from rowhaul.schedule.growing import extended, extended_stack
from rowhaul.schedule.lifetimes.status import Status
from rowhaul.schedule.saved import Arrays, Saved, named

if TYPE_CHECKING:
    from rowhaul.schedule.lifetimes import Lifetimes

# One cache line. Masks have bit j for worker j.
SLOT = np.dtype(
    [
        ("key", np.int64),
        ("members", np.uint64),  # HOME: clean copies; OWNED: the owner; SPLIT: who owes a gradient (U)
        ("settled", np.uint64),  # SPLIT: who has handed its gradient to the home (P)
        ("base", np.uint64),  # SPLIT: who holds the record from before the step; 0 is the home
        ("table", np.int32),
        ("state", np.uint8),
        ("window", np.int16),  # batches in the window that name the row
        ("touched", np.int32),  # the last iteration that trained, moved or evicted the row, or -1
        ("next_use", np.int32),  # the next iteration in the window that needs the row, or 0
        ("stamp", np.int32),  # the last batch that named it
        ("local", np.int32),  # its place there
        ("trained", np.int32),  # the last iteration that trained it: a split row's gradients are from then
        ("head", np.int32),  # the first of its copies in caches, or -1
    ],
    align=True,
)
FIRST_SLOTS = 1024
NO_WINDOW = -(1 << 31)  # before all batches
PINNED, RESTORED = -2, -3  # stamps of rows that no batch has named; see also `kernels.NEVER`
# What of a slot outlives the process; the window says the rest.
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
    offsets: npt.NDArray[np.int64]  # samples + 1
    rows: npt.NDArray[np.int32]  # index into `slots`; a sample names a row once
    slots: npt.NDArray[np.int32]  # the distinct rows, ordered by (table, key)
    tables: npt.NDArray[np.int32]  # distinct rows
    keys: npt.NDArray[np.int64]  # distinct rows
    occurrences: npt.NDArray[np.int32]  # distinct rows: samples that name each
    next_use: npt.NDArray[np.int32]  # distinct rows: the next batch of the window that names each, or 0
    new: npt.NDArray[np.int32]  # index into `slots`: the rows that had none before
    num_full_filters: int  # of rows ever seen, when it was located: its fresh rows are in none of them
    ids: IdBatch

    @property
    def num_samples(self) -> int:
        """Samples in the batch."""
        return len(self.offsets) - 1


class Directory:
    """Row states, and the slots they live in.

    Args:
        first_touch: rows never trained are FRESH; otherwise they are at home, too.
        lifetimes: which rows there are, where tables have policies; their rows are FRESH when admitted.
    """

    def __init__(self, *, first_touch: bool, lifetimes: Lifetimes | None = None) -> None:
        self.slots: npt.NDArray[Any] = np.zeros(0, SLOT)
        self.appearances: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # slots: samples that named each
        self.first_touch = first_touch
        self._index = RowIndex()
        self._free: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._num_free = 0
        self._lifetimes = lifetimes if lifetimes is not None and lifetimes.has_policy.any() else None
        self._seen = SeenRows() if first_touch else None
        self._reserve(FIRST_SLOTS)

    @property
    def num_rows(self) -> int:
        """Rows that have a slot."""
        return len(self.slots) - self._num_free

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes taken by what grows with cached rows, and by what grows with all rows ever seen."""
        return {
            "slots": self.slots.nbytes + self._free.nbytes + self._index.places.nbytes,
            "seen": self._seen.memory_bytes if self._seen else 0,
            "lifetimes": self._lifetimes.memory_bytes if self._lifetimes else 0,
        }

    def names(self, slots: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The tables and keys of the rows in these slots."""
        # Field by field: indexing whole records takes NumPy twenty times as long.
        return self.slots["table"][slots], self.slots["key"][slots]

    def locate(
        self, number: int, batch: IdBatch, window_begins: int = NO_WINDOW
    ) -> tuple[LocatedBatch, tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """Give every row of a batch a slot.

        Rows that no batch since ``window_begins`` has named are used next in this one. Returns the batch and,
        for each distinct row, the earlier batch that named it last and its place there, from which the
        window links the uses of a row.
        """
        given = batch.by_feature
        if given is not None and given.is_simple:
            found = distinct_by_feature(given.tables, given.values, given.lengths)
        else:
            found = distinct_rows(batch.offsets, batch.tables, batch.keys)
        offsets, rows, tables, keys, occurrences = found
        self._reserve(len(keys))
        slots, previous_batch, previous_local, new, self._num_free = kernels.locate(
            tables, keys, self._index.places, self.slots, self._free, self._num_free, number, window_begins
        )
        new_slots = slots[new]
        self.appearances[new_slots] = 0
        if self._seen is not None:
            unseen = ~self._seen.contains(tables[new], keys[new])
            if self._lifetimes is not None:
                unseen &= ~self._lifetimes.has_policy[tables[new]]  # of these `admit` decides
            kernels.set_state(self.slots, new_slots[unseen], np.uint8(State.FRESH))
        next_use = np.zeros(len(slots), np.int32)
        num_full = 0 if self._seen is None else self._seen.num_full
        located = LocatedBatch(
            number, offsets, rows, slots, tables, keys, occurrences, next_use, new, num_full, batch
        )
        return located, (previous_batch, previous_local)

    def admit(self, batch: LocatedBatch) -> int:
        """Have the policies of tables decide which rows of a batch are trained; returns how many are new."""
        if self._lifetimes is None:
            return 0
        subject = np.flatnonzero(self.slots["state"][batch.slots] != State.REPLICATED)
        status = self._lifetimes.see(
            batch.number, batch.tables[subject], batch.keys[subject], batch.occurrences[subject]
        )
        slots = batch.slots[subject]
        admitted = status == Status.ADMITTED
        begins = State.FRESH if self.first_touch else State.HOME
        kernels.set_state(self.slots, slots[status == Status.WAITING], np.uint8(State.NOT_ADMITTED))
        kernels.set_state(self.slots, slots[admitted], np.uint8(begins))
        return int(admitted.sum())

    def find(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The slots of those of these rows that have one."""
        slots = self._index.find(tables, keys)
        return slots[slots >= 0]

    def forget(self, slots: npt.NDArray[np.int32], iteration: int) -> None:
        """Rows are as if never trained once an iteration is over; no cache has copies of them any more."""
        for name in ("members", "settled", "base"):
            self.slots[name][slots] = 0
        self.slots["state"][slots] = State.HOME
        self.slots["touched"][slots] = iteration  # what may be held of them goes when it ends, not before

    def remember_trained(self, batch: LocatedBatch, fresh: npt.NDArray[np.int32]) -> None:
        """Note that those rows of a batch that are fresh are being trained: from now on they are not."""
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
        known = named[0] != kernels.NEVER
        self.slots["stamp"][batch.slots[known]] = named[0][known]  # who named them is of use to the window
        self.slots["local"][batch.slots[known]] = named[1][known]
        before = self.slots["state"][batch.slots]
        for name in ("members", "settled", "base"):
            self.slots[name][batch.slots] = 0
        self.slots["state"][batch.slots] = state
        return batch.slots, before

    def unpin(
        self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64], touched: int
    ) -> npt.NDArray[np.int32]:
        """Let pinned rows be rows like any other, at home, where iteration ``touched`` left them."""
        slots, _ = self.pin(tables, keys, State.HOME)
        self.slots["window"][slots] -= 2  # once for each time that they were pinned
        self.slots["touched"][slots] = touched
        self.appearances[slots] = 0
        if self._seen is not None:
            self._remember(slots)  # whether trained or not, their home has them
        return slots

    def release(self, candidates: npt.NDArray[np.int32]) -> None:
        """Give back the slots of those candidates that neither the window nor a cache names."""
        self._num_free = kernels.release(
            self.slots, candidates, self._index.places, self._free, self._num_free
        )

    def mark_trained(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        """Note that rows were trained before the first iteration: they are at home."""
        if self._seen is None:
            return  # no row is fresh
        self._seen.add(tables, keys)
        fresh = self.slots["state"] == State.FRESH
        unknown = np.flatnonzero(fresh & (self.slots["stamp"] != kernels.NEVER)).astype(np.int32)
        self.slots["state"][unknown[self._seen.contains(*self.names(unknown))]] = State.HOME

    def placed_rows(self) -> npt.NDArray[np.int32]:
        """The slots of rows that are not simply at home, without a copy, ordered by (table, key)."""
        slots = self.slots
        placed = (slots["state"] != State.HOME) | (slots["members"] != 0) | (slots["base"] != 0)
        return self._ordered(placed & (slots["stamp"] != kernels.NEVER))

    def held_rows(self) -> npt.NDArray[np.int32]:
        """The slots of rows that some rank may hold something of, but for replicated ones."""
        known = self.slots["stamp"] != kernels.NEVER
        elsewhere = (State.FRESH, State.NOT_ADMITTED, State.REPLICATED)
        return np.flatnonzero(known & ~np.isin(self.slots["state"], elsewhere)).astype(np.int32)

    def export(self) -> tuple[npt.NDArray[np.int32], Arrays]:
        """The slots of all rows but the pinned ones, ordered by (table, key), and all there is to know of
        these and of earlier rows, as plain arrays.
        """
        slots = self._ordered(
            (self.slots["stamp"] != kernels.NEVER) & (self.slots["state"] != State.REPLICATED)
        )
        arrays = {name: self.slots[name][slots] for name in ("table", "key", *_SAVED)}
        arrays["trained"][arrays["state"] != State.SPLIT] = -1  # what it was does not matter any more
        arrays["appearances"] = self.appearances[slots]
        if self._seen is not None:
            arrays |= named("seen", self._seen.export())
        return slots, arrays

    def restore(self, saved: Saved, num_tables: int, num_workers: int) -> npt.NDArray[np.int32]:
        """Know what the directory knew where `export` was called; returns the slots in the same order.

        Nothing but pinned rows may be known here yet. Batches of the window are not named any more.
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

    def _ordered(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
        slots = np.flatnonzero(chosen).astype(np.int32)
        order: npt.NDArray[np.int32] = kernels.sorted_rows(*self.names(slots), len(slots))
        return slots[order]

    def _remember(self, slots: npt.NDArray[np.int32]) -> None:
        assert self._seen is not None
        self._seen.add(*self.names(slots))

    def _reserve(self, more: int) -> None:
        if more > self._num_free:
            old = len(self.slots)
            total = max(2 * old, old + more)
            self.slots = extended(self.slots, total)
            self.slots["stamp"][old:] = kernels.NEVER
            self.slots["head"][old:] = -1
            self.appearances = extended(self.appearances, total)
            self._free = extended_stack(self._free, self._num_free, total)
            self._num_free += total - old
        self._index.reserve(self.num_rows + more)
