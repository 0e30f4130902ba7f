"""Where the latest version of every row is: the state that all ranks keep alike.

Only rows that a cache holds or the window names have a record here (a *slot*, 64 bytes). All other
rows are at home, or fresh if they were never trained, which a compact filter remembers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError
from rowhaul.schedule.batch import IdBatch
from rowhaul.schedule.directory import kernels
from rowhaul.schedule.directory.index import RowIndex
from rowhaul.schedule.directory.seen import SeenRows
from rowhaul.schedule.directory.sightings import Sightings
from rowhaul.schedule.directory.states import State
from rowhaul.schedule.growing import extended, extended_stack
from rowhaul.schedule.saved import Arrays, Saved, named

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
    ids: IdBatch

    @property
    def num_samples(self) -> int:
        """Samples in the batch."""
        return len(self.offsets) - 1


class Directory:
    """Row states, and the slots they live in."""

    def __init__(self, *, first_touch: bool, admit_after: int) -> None:
        self.slots: npt.NDArray[Any] = np.zeros(0, SLOT)
        self.appearances: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # slots: samples that named each
        self.first_touch = first_touch
        self._index = RowIndex()
        self._free: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._num_free = 0
        self._seen = SeenRows() if first_touch or admit_after > 1 else None
        self._sightings = Sightings(admit_after) if admit_after > 1 else None
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
            "sightings": self._sightings.memory_bytes if self._sightings else 0,
        }

    def names(self, slots: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The tables and keys of the rows in these slots."""
        # Field by field: indexing whole records takes NumPy twenty times as long.
        return self.slots["table"][slots], self.slots["key"][slots]

    def locate(self, number: int, batch: IdBatch) -> tuple[LocatedBatch, npt.NDArray[Any]]:
        """Give every row of a batch a slot.

        Returns the batch and, for each distinct row, the earlier batch that named it last and its
        place there, from which the window links the uses of a row.
        """
        self._reserve(len(batch.keys))
        offsets, rows, slots, tables, keys, occurrences, *rest = kernels.locate(
            batch.offsets,
            batch.tables,
            batch.keys,
            self._index.places,
            self.slots,
            self._free,
            self._num_free,
            number,
        )
        previous_batch, previous_local, is_new, self._num_free = rest
        self.appearances[slots[is_new]] = 0
        if self._seen is not None:
            unseen = ~self._seen.contains(tables[is_new], keys[is_new])
            state = State.NOT_ADMITTED if self._sightings else State.FRESH
            self.slots["state"][slots[is_new][unseen]] = state
        next_use = np.zeros(len(slots), np.int32)
        located = LocatedBatch(number, offsets, rows, slots, tables, keys, occurrences, next_use, batch)
        return located, np.stack([previous_batch, previous_local])

    def admit(self, batch: LocatedBatch) -> None:
        """Count the sightings of rows that are not admitted, and admit those seen often enough."""
        if self._sightings is None:
            return
        waiting = self.slots["state"][batch.slots] == State.NOT_ADMITTED
        slots = batch.slots[waiting]
        admitted = self._sightings.admit(*self.names(slots), batch.occurrences[waiting])
        self.slots["state"][slots[admitted]] = State.FRESH if self.first_touch else State.HOME
        self._remember(slots[admitted])

    def remember_trained(self, batch: LocatedBatch) -> None:
        """Note that the fresh rows of a batch are being trained: from now on they are not fresh."""
        if self._seen is not None and self._sightings is None:
            self._remember(batch.slots[self.slots["state"][batch.slots] == State.FRESH])

    def pin(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64], state: State) -> None:
        """Give rows a state that they keep for good, and a slot that is never given back."""
        offsets = np.array([0, len(keys)], np.int64)
        batch, _ = self.locate(PINNED, IdBatch(offsets, tables, keys))
        self.slots["state"][batch.slots] = state

    def release(self, candidates: npt.NDArray[np.int32]) -> None:
        """Give back the slots of those candidates that neither the window nor a cache names."""
        self._num_free = kernels.release(
            self.slots, candidates, self._index.places, self._free, self._num_free
        )

    def mark_trained(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        """Note that rows were trained before the first iteration: they are at home, and admitted."""
        if self._seen is None:
            return  # no row is fresh, and all are admitted
        self._seen.add(tables, keys)
        waiting = np.isin(self.slots["state"], (State.FRESH, State.NOT_ADMITTED))
        unknown = np.flatnonzero(waiting & (self.slots["stamp"] != kernels.NEVER)).astype(np.int32)
        self.slots["state"][unknown[self._seen.contains(*self.names(unknown))]] = State.HOME

    def placed_rows(self) -> npt.NDArray[np.int32]:
        """The slots of rows that are not simply at home, without a copy, ordered by (table, key)."""
        slots = self.slots
        placed = (slots["state"] != State.HOME) | (slots["members"] != 0) | (slots["base"] != 0)
        return self._ordered(placed & (slots["stamp"] != kernels.NEVER))

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
        if self._sightings is not None:
            arrays |= named("sightings", self._sightings.export())
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
        if self._sightings is not None:
            self._sightings.restore(saved.part("sightings"))
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
