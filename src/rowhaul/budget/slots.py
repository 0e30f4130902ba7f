"""`SlotMap`: which ids have a row of their own: integers that follow from the ids, the same on every rank."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rowhaul.budget.room import BUCKET, SKETCH_ROWS, Room, owner_bytes
from rowhaul.budget.settings import BudgetSettings
from rowhaul.budget.sharing import divided, masks, shared_rows
from rowhaul.budget.slot_kernels import (
    OTHERS,
    count_rows,
    decay_counts,
    estimate_rows,
    find_rows,
    give_slots,
    list_newcomers,
    seat_newcomers,
)
from rowhaul.errors import CheckpointError

Int64s = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]
_FIRST_DIVISION = 10  # steps before shared rows are divided anew, for the first time
_WANTED = ("wanted", "wanted_tables", "estimates")
_WORD = 2**64 - 1


@dataclass(frozen=True)
class FoundRows:
    """The rows that distinct ids read, table by table: a slot, or ``-1 - j`` for shared row ``j``."""

    starts: Int64s  # tables + 1
    rows: Int64s
    hashed: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Seated:
    """Slots that were empty and are rows from now on, which begin as any row of their table and name does."""

    tables: Int64s
    slots: Int64s


NOBODY = Seated(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class HandOver:
    """Rows that change hands between two steps.

    Rows that are gone end first; then each new row begins with the values that its source, a shared row of
    the same table, has before anything changes, and with fresh optimizer state. A name may be in both lists.
    """

    tables: npt.NDArray[np.int32]
    rows: Int64s
    sources: Int64s
    gone_tables: npt.NDArray[np.int32]
    gone_rows: Int64s


class SlotMap:
    """Which ids of the tables of one row size have a row of their own, and how often all are read.

    Args:
        names: of the tables.
        seed: of the run.
        settings: of the budget.
        room: how much of everything there is.
    """

    def __init__(self, names: Sequence[str], seed: int, settings: BudgetSettings, room: Room) -> None:
        self.names, self.settings, self.room, self.seed = tuple(names), settings, room, seed
        # The name, not the position, so that adding a table does not change where others' ids go.
        seeds = [xxhash.xxh64_intdigest(name.encode(), seed=seed & _WORD) for name in names]
        self.seeds = np.array(seeds, np.uint64)  # of the tables' hashes
        self.clear()

    @classmethod
    def from_state(
        cls, names: Sequence[str], seed: int, settings: BudgetSettings, arrays: Mapping[str, npt.NDArray[Any]]
    ) -> SlotMap:
        """Return the map of a `state`, whatever its size."""
        sizes = len(arrays["marks"]), int(arrays["shared_sizes"].sum())
        room = Room(
            *sizes, len(arrays["sketch"]) // SKETCH_ROWS, len(arrays["wanted"]), 0, owner_bytes(len(names))
        )
        made = cls(names, seed, settings, room)
        made.load_state(arrays)
        return made

    def clear(self) -> None:
        """Forget every id."""
        room, num_tables = self.room, len(self.seeds)
        self._marks = np.zeros(room.num_slots, np.uint16)
        self.owners = np.zeros(room.num_slots, np.uint8 if room.owner_bytes == 1 else np.uint16)
        self._counts = np.zeros(room.num_slots, np.uint16)
        self._sketch = np.zeros((SKETCH_ROWS, room.sketch_width), np.uint8)
        self._wanted = np.zeros(room.num_wanted, np.uint64)
        self._wanted_tables = np.zeros(room.num_wanted, self.owners.dtype)
        self._estimates = np.zeros(room.num_wanted, np.uint8)
        self.shared_sizes: Int64s = divided(room.num_shared, [1] * num_tables)
        self.traffic = np.zeros(num_tables, np.int64)  # reads of shared rows since these were divided
        self._divided_at = 0
        self._num_empty = room.num_slots

    @property
    def num_taken(self) -> int:
        """Slots that ids have."""
        return int(np.count_nonzero(self._marks))

    @property
    def taken(self) -> Int64s:
        """The slots that ids have, in order."""
        return np.flatnonzero(self._marks)

    def belong(self, slots: Int64s, table: int) -> npt.NDArray[np.bool_]:
        """Whether ids of a table have these slots."""
        found: npt.NDArray[np.bool_] = (self._marks[slots] != 0) & (self.owners[slots] == table)
        return found

    @property
    def allocated_bytes(self) -> int:
        """Bytes of everything here."""
        return sum(one.nbytes for one in self._arrays().values())

    def find(self, keys: Int64s, starts: Int64s) -> FoundRows:
        """Find the rows of distinct keys, given table by table; nothing changes, in any thread."""
        hashed, rows = np.empty(len(keys), np.uint64), np.empty(len(keys), np.int64)
        shared = self.shared_sizes, masks(self.shared_sizes).astype(np.uint64)
        find_rows(keys, starts, self.seeds, self._marks, self.owners, *shared, hashed, rows)
        return FoundRows(starts, rows, hashed)

    def seat(self, found: FoundRows, accesses: npt.NDArray[Any]) -> Seated:
        """Give the ids of one global batch that have no slot those that are empty; rows are as just found.

        If there are too few, those get one that the batch reads most. Ids that look the same share one, so
        rows have to be found again wherever any were taken.
        """
        if not self._num_empty:
            return NOBODY
        places, tables = np.empty(len(found.rows), np.int64), np.empty(len(found.rows), np.int64)
        count = list_newcomers(found.starts, found.hashed, found.rows, self._marks, places, tables)
        places, tables = places[:count], tables[:count]
        hashed = found.hashed[places]
        order = np.lexsort((tables, hashed, -np.asarray(accesses, np.int64)[places]))
        slots, is_new = np.empty(count, np.int64), np.empty(count, np.bool_)
        args = self._marks, self.owners, self._counts
        seat_newcomers(hashed[order], tables[order], *args, slots, is_new)
        self._num_empty -= int(is_new.sum())
        return Seated(tables[order][is_new], slots[is_new])

    def finding(self, unseated: Sequence[Seated] = ()) -> Arrays:
        """What `find` needs, as if some had not been seated; not copied where there are none."""
        marks, owners = self._places(unseated)
        return {"marks": marks, "owners": owners, "shared_sizes": self.shared_sizes}

    def _places(self, unseated: Sequence[Seated]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[Any]]:
        if not any(len(one.slots) for one in unseated):
            return self._marks, self.owners
        marks, owners = self._marks.copy(), self.owners.copy()
        for one in unseated:
            marks[one.slots], owners[one.slots] = 0, 0
        return marks, owners

    def find_as(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Find what another map finds, given its `finding`; not copied, and nothing is counted here."""
        self._marks, self.owners, self.shared_sizes = (arrays[name] for name in self.finding())

    def count(self, found: FoundRows, accesses: npt.NDArray[Any]) -> None:
        """Count the accesses of one global batch: once a step, with rows as found since the last `change`."""
        args = found.starts, found.hashed, found.rows
        accesses = np.ascontiguousarray(accesses, np.int64)
        wanted = self._wanted, self._wanted_tables, self._estimates
        others = np.empty((len(found.rows), OTHERS), np.int64)
        count_rows(*args, accesses, self._counts, self._sketch, self.traffic, *wanted, others)

    def change(self, now: int) -> HandOver:
        """After ``now`` steps, which is a stop: decay counts, and give slots to those who are read more."""
        gap = now - self.settings.last_stop(now)
        base = round(self.settings.decay * 2**32)
        salt = xxhash.xxh64_intdigest(struct.pack("<qQ", now, self.seed & _WORD))
        decay_counts(self._counts, self._sketch, np.uint64(base**gap >> 32 * (gap - 1)), np.uint64(salt))
        tables, slots, before, hashed = self._give()
        sources = -1 - shared_rows((hashed >> np.uint64(16)).astype(np.int64), self.shared_sizes[tables])
        had_owner = before >= 0
        self._num_empty -= len(slots) - int(had_owner.sum())
        grown_tables, grown, grown_from, shrunk_tables, shrunk = self._divide(now)
        return HandOver(
            np.concatenate([tables, grown_tables]).astype(np.int32),
            np.concatenate([slots, grown]),
            np.concatenate([sources, grown_from]),
            np.concatenate([before[had_owner], shrunk_tables]).astype(np.int32),
            np.concatenate([slots[had_owner], shrunk]),
        )

    def _give(self) -> tuple[Int64s, Int64s, Int64s, npt.NDArray[np.uint64]]:
        """Give slots to the most wanted; returns their tables, slots, owners before and hashes."""
        listed = np.flatnonzero(self._estimates)
        hashed, tables = self._wanted[listed], self._wanted_tables[listed].astype(np.int64)
        estimates = np.empty(len(listed), np.int64)
        estimate_rows(hashed, self._sketch, estimates)  # as they have decayed
        order = np.lexsort((tables, hashed, -estimates))
        hashed, tables, estimates = hashed[order], tables[order], estimates[order]
        slots, before = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
        give_slots(hashed, tables, estimates, self._marks, self.owners, self._counts, slots, before)
        self._estimates[:], self._wanted[:], self._wanted_tables[:] = 0, 0, 0
        # A slot may have gone to one and then to another in the same stop: the last one has it.
        last = _last_of_each(slots)
        first = _first_of_each(slots)
        return tables[last], slots[last], before[first], hashed[last]

    def _divide(self, now: int) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s]:
        """Divide shared rows anew, by who has read them since, each time steps have doubled.

        Of a table that gets more, new rows begin as those that their ids have read.
        Returns tables and names of new rows, their sources, and tables and names of rows that are gone.
        """
        nothing = np.empty(0, np.int64)
        if now < max(_FIRST_DIVISION, 2 * self._divided_at) or not self.traffic.any():
            return nothing, nothing, nothing, nothing, nothing
        old, new = self.shared_sizes, divided(self.room.num_shared, self.traffic.tolist())
        self.shared_sizes, self._divided_at = new, now
        self.traffic = np.zeros_like(self.traffic)
        grown_tables, grown = _numbers_from_to(old, new)
        shrunk_tables, shrunk = _numbers_from_to(new, old)
        sources = shared_rows(grown, old[grown_tables])
        return grown_tables, -1 - grown, -1 - sources, shrunk_tables, -1 - shrunk

    def state(self, unseated: Sequence[Seated] = ()) -> Arrays:
        """Everything, as arrays that do not depend on the order of ids in a batch.

        Some may be left out that were seated and not counted yet.
        """
        # Of the wanted, only who they are does not: here they are in order within each bucket.
        buckets = np.arange(len(self._wanted)) // BUCKET
        order = np.lexsort((self._wanted_tables, self._wanted, self._estimates, buckets))
        wanted = {name: one[order] for name, one in self._arrays().items() if name in _WANTED}
        marks, owners = self._places(unseated)
        return {**self._arrays(), **wanted, "marks": marks, "owners": owners}

    def _arrays(self) -> Arrays:
        return {
            "marks": self._marks,
            "owners": self.owners,
            "counts": self._counts,
            "sketch": self._sketch.reshape(-1),
            "wanted": self._wanted,
            "wanted_tables": self._wanted_tables,
            "estimates": self._estimates,
            "shared_sizes": self.shared_sizes,
            "traffic": self.traffic,
            "divided_at": np.array([self._divided_at], np.int64),
        }

    def check_state(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Refuse arrays of another budget."""
        for name, ours in self._arrays().items():
            given = arrays.get(name)
            if given is None or given.dtype != ours.dtype or given.shape != ours.shape:
                theirs = "none" if given is None else f"{given.dtype} {given.shape}"
                raise CheckpointError(
                    f"the slots of a budget have {name} of {ours.dtype} {ours.shape} here, and {theirs} in "
                    "what is loaded: both need the same tables, row size and prune.budget"
                )

    def load_state(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Replace everything by what `state` returned."""
        self.check_state(arrays)
        self._marks, self.owners = arrays["marks"].copy(), arrays["owners"].copy()
        self._counts, self._sketch = arrays["counts"].copy(), arrays["sketch"].reshape(SKETCH_ROWS, -1).copy()
        self._wanted, self._wanted_tables = arrays["wanted"].copy(), arrays["wanted_tables"].copy()
        self._estimates, self.traffic = arrays["estimates"].copy(), arrays["traffic"].copy()
        self.shared_sizes, self._divided_at = arrays["shared_sizes"].copy(), int(arrays["divided_at"][0])
        self._num_empty = len(self._marks) - self.num_taken


def _numbers_from_to(first: Int64s, end: Int64s) -> tuple[Int64s, Int64s]:
    """For each table the numbers from ``first`` to ``end`` - 1; returns their tables and them."""
    lengths = np.maximum(end - first, 0)
    tables = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return tables, np.arange(len(tables)) - starts[tables] + first[tables]


def _first_of_each(slots: Int64s) -> Int64s:
    """Where each slot is named first, by slot; -1 is no slot."""
    named, first = np.unique(slots, return_index=True)
    return first[named >= 0]


def _last_of_each(slots: Int64s) -> Int64s:
    """Where each slot is named last, by slot."""
    named, place = np.unique(slots[::-1], return_index=True)
    return (len(slots) - 1 - place)[named >= 0]
