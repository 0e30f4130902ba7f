"""Where the rows that a plan touches are on one rank: located once an iteration, then known by address.

A plan names a row many times: in moves, in steps, in the batch. Each row is looked up once in the cache and
once at home; records never move in memory, so every phase and training use the addresses found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.phases import FROM_CACHE, FROM_HOME, TO_CACHE, TO_HOME, Kinds, Payloads, RankPhases
from rowhaul.runtime.record_kernels import (
    mark_absent,
    mark_arrivals,
    note_records,
    pack_records,
    pick_needed,
    unpack_records,
)
from rowhaul.runtime.row_memory import MissingRowError, RowMemory
from rowhaul.schedule.plan import Payload
from rowhaul.schedule.row_states import State
from rowhaul.transport.base import Bytes

Ints = npt.NDArray[np.int64]
Sizes = tuple[Ints, Ints]
"""By table: bytes of a row's values, and of its record."""

_IN_CACHE, _AT_HOME, _ARRIVED, _ABSENT = 1, 2, 4, 8  # bits of each row


class Located:
    """The rows of `RankPhases` in one memory: the location and the address of each one's record."""

    def __init__(self, memory: RowMemory | None, phases: RankPhases) -> None:
        self.memory, self.phases = memory, phases
        self.records: Ints = np.full(len(phases.keys), -1)
        self.addresses: Ints = np.zeros(len(phases.keys), np.int64)
        self._num_removals = -1  # of the memory, when rows were looked up

    def look_up(self, needed: npt.NDArray[np.uint8], bit: int) -> None:
        """Locate the rows that have a bit set, unless that was done and no row was removed since.

        A memory that makes rows has all of them afterwards.
        """
        memory = self.memory
        if memory is None or self._num_removals == memory.num_removals:
            return
        if self._num_removals >= 0:  # not for the first time
            self.records.fill(-1)
            self.addresses.fill(0)
        for number, group in enumerate(memory.groups):
            places, keys, starts = self.rows_of_group(number, needed, bit)
            if len(places):
                make = memory.makes_rows
                found = group.find_or_make(keys, starts) if make else group.index.find(keys, starts)[0]
                self._note(number, places, found)
        self._num_removals = memory.num_removals

    def insert(self, needed: npt.NDArray[np.uint8]) -> None:
        """Insert absent rows; those whose records have not arrived get their initial values."""
        assert self.memory is not None
        for number, group in enumerate(self.memory.groups):
            places, keys, starts = self.rows_of_group(number, needed, _ABSENT)
            if len(places):
                arrived = (needed[places] & _ARRIVED) != 0
                self._note(number, places, group.make(keys, starts, unwritten=arrived))

    def pack(self, payloads: Payloads, kinds: Kinds, sizes: Sizes, out: Bytes) -> int:
        """Copy records into the buffer of a phase; return a payload whose record is missing, or -1."""
        return self._copy(pack_records, payloads, kinds, sizes, out)

    def unpack(self, payloads: Payloads, kinds: Kinds, sizes: Sizes, given: Bytes) -> int:
        """Overwrite records with those received; return a payload whose record is missing, or -1."""
        self._before_change(payloads, kinds)
        return self._copy(unpack_records, payloads, kinds, sizes, given)

    def _copy(self, kernel: Any, payloads: Payloads, kinds: Kinds, sizes: Sizes, buffer: Bytes) -> int:
        columns = payloads.kind, payloads.payload, payloads.row, payloads.offsets, kinds
        return int(kernel(*columns, self.addresses, self.phases.tables, *sizes, buffer.ctypes.data))

    def _before_change(self, payloads: Payloads, kinds: Kinds) -> None:
        """Call this before records are overwritten by those received: a snapshot may need them first."""
        memory = self.memory
        if memory is None or all(group.arena.keeper is None for group in memory.groups):
            return
        changed = kinds[payloads.kind].astype(np.bool_) & ((payloads.payload & int(Payload.VALUES)) != 0)
        rows = np.unique(payloads.row[changed])
        for number, places, _ in memory.by_group(self.phases.tables[rows]):
            memory.groups[number].arena.before_change(self.records[rows[places]])

    def rows_of_group(self, number: int, needed: npt.NDArray[np.uint8], bit: int) -> tuple[Ints, Ints, Ints]:
        """Pick the rows of a group that have a bit set, table by table: numbers, keys, starts of tables."""
        assert self.memory is not None
        phases, num_tables = self.phases, len(self.memory.groups[number].tables)
        picked: tuple[Ints, Ints, Ints] = pick_needed(
            phases.tables, phases.keys, needed, bit, *self.memory.places, number, num_tables
        )
        return picked

    def _note(self, number: int, places: Ints, locations: Ints) -> None:
        assert self.memory is not None
        arena = self.memory.groups[number].arena
        note_records(
            arena.addresses, arena.shift, arena.record_bytes, places, locations, self.records, self.addresses
        )


class RowLocations:
    """The rows of `RankPhases` in the cache and at the home of a rank, either of which it may not have."""

    def __init__(self, phases: RankPhases, cache: RowMemory | None, home: RowMemory | None) -> None:
        self.phases, self._needed = phases, phases.needed.copy()
        self.cache = Located(None, phases) if cache is None else cache.locate(phases)
        self.home = Located(None, phases) if home is None else home.locate(phases)
        memory = cache or home
        assert memory is not None
        self.memory = memory
        self.sizes = memory.sizes

    def look_up(self) -> None:
        """Locate all rows, again only if rows were removed since."""
        self.cache.look_up(self._needed, _IN_CACHE)
        self.home.look_up(self._needed, _AT_HOME)

    def pack(self, payloads: Payloads, out: Bytes) -> None:
        """Write the records that are sent into the buffer of their phase."""
        for located, kinds in ((self.home, FROM_HOME), (self.cache, FROM_CACHE)):
            self._check(payloads, located.pack(payloads, kinds, self.sizes, out))

    def unpack_at_home(self, payloads: Payloads, given: Bytes) -> None:
        """Overwrite records at home with those received."""
        if self.home.memory is not None:
            self._check(payloads, self.home.unpack(payloads, TO_HOME, self.sizes, given))

    def insert_arrivals(self, arrivals: list[tuple[Payloads, Bytes]]) -> None:
        """Insert received and first-time rows into the cache."""
        plan, needed, cache = self.phases.plan, self._needed, self.cache
        for payloads, _ in arrivals:
            mark_arrivals(payloads.kind, payloads.payload, payloads.row, TO_CACHE, needed, _ARRIVED)
        missing = mark_absent(
            plan.trainers, plan.states, self.phases.mask, cache.records, needed, _ARRIVED, _ABSENT,
            int(State.FRESH), int(State.REPLICATED), int(State.NOT_ADMITTED),
        )  # fmt: skip
        if missing >= 0:
            raise self._missing(missing)
        cache.insert(needed)
        for payloads, given in arrivals:
            self._check(payloads, cache.unpack(payloads, TO_CACHE, self.sizes, given))

    def _check(self, payloads: Payloads, missing: int) -> None:
        if missing >= 0:
            raise self._missing(int(payloads.row[missing]))

    def _missing(self, row: int) -> MissingRowError:
        phases = self.phases
        return MissingRowError(
            f"key {int(phases.keys[row])} of table number {int(phases.tables[row])} is not where the plan of "
            f"iteration {phases.plan.iteration} has it; please report this"
        )
