"""Where the rows of one batch are on one rank: found once an iteration, used by every turn and by training.

A plan names its rows once and then speaks of them many times: in moves, in steps, in the batch that is
trained. Each row is looked up once in the cache and once at home, and known by its address from then on:
chunks of records never move. What is none of the batch (evicted rows) is not in here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.phases import FROM_HOME, TO_CACHE, Kinds, Payloads
from rowhaul.runtime.record_kernels import (
    mark_absent,
    mark_arrivals,
    note_records,
    pack_rows,
    pick_needed,
    unpack_rows,
)
from rowhaul.runtime.row_memory import MissingRowError, RowMemory
from rowhaul.schedule.plan import Plan
from rowhaul.schedule.row_states import State
from rowhaul.transport.base import Bytes

Ints = npt.NDArray[np.int64]

_IN_CACHE, _AT_HOME, _ARRIVED, _ABSENT = 1, 2, 4, 8  # of each row: what is needed, and what has come


class Located:
    """The rows of a batch in one memory: the number of each one's record, and its address."""

    def __init__(self, memory: RowMemory | None, num_rows: int) -> None:
        self.memory = memory
        self.records: Ints = np.full(num_rows, -1)
        self.addresses: Ints = np.zeros(num_rows, np.int64)
        self._is_new = True
        self._removals = -1

    @property
    def is_current(self) -> bool:
        """Whether rows were looked up, and nothing was removed from the memory since."""
        return self.memory is None or self._removals == self.memory.num_removals

    def look_up(self, plan: Plan, needed: npt.NDArray[np.uint8], bit: int) -> None:
        """Find the rows that a bit is set of; where the memory makes rows, all are there afterwards."""
        memory = self.memory
        if memory is None:
            return
        if not self._is_new:
            self.records.fill(-1)
            self.addresses.fill(0)
        self._is_new = False
        for number, group in enumerate(memory.groups):
            places, keys, starts = pick_needed(
                plan.tables, plan.keys, needed, bit, *memory.places, number, len(group.tables)
            )
            if len(places):
                make = memory.makes_rows
                found = group.find_or_make(keys, starts) if make else group.index.find(keys, starts)[0]
                self._note(number, places, found)
        self._removals = memory.num_removals

    def add(self, plan: Plan, needed: npt.NDArray[np.uint8]) -> None:
        """Make room for rows that are absent; those that did not come get their first values."""
        memory = self.memory
        assert memory is not None
        for number, group in enumerate(memory.groups):
            places, keys, starts = pick_needed(
                plan.tables, plan.keys, needed, _ABSENT, *memory.places, number, len(group.tables)
            )
            if len(places):
                came = (needed[places] & _ARRIVED) != 0
                found = group.make(keys, starts, unwritten=came)
                self._note(number, places, found)

    def _note(self, number: int, places: Ints, locations: Ints) -> None:
        assert self.memory is not None
        arena = self.memory.groups[number].arena
        note_records(
            arena.addresses, arena.shift, arena.record_bytes, places, locations, self.records, self.addresses
        )


class RowLocations:
    """The rows of a plan in the cache and at the home of a rank, either of which it may not have."""

    def __init__(
        self,
        plan: Plan,
        needed: npt.NDArray[np.uint8],
        rank: int,
        cache: RowMemory | None,
        home: RowMemory | None,
    ) -> None:
        self._plan, self._needed = plan, needed.copy()
        self._mask = np.uint64(1 << rank if rank < plan.num_workers else 0)
        self.cache, self.home = Located(cache, len(plan.keys)), Located(home, len(plan.keys))
        memory = cache or home
        sizes = memory.layout.sizes() if memory else None
        self.value_bytes = np.array(sizes.values if sizes else (), np.int64)
        self.record_bytes = np.array(sizes.records if sizes else (), np.int64)

    def look_up(self) -> None:
        """Find all rows, unless they are known."""
        for part, bit in ((self.cache, _IN_CACHE), (self.home, _AT_HOME)):
            if not part.is_current:
                part.look_up(self._plan, self._needed, bit)

    def pack(self, payloads: Payloads, out: Bytes) -> None:
        """Write the records that are sent into the buffer of their turn."""
        odd = pack_rows(
            payloads.kind, payloads.payload, payloads.table, payloads.row, payloads.offsets, FROM_HOME,
            self.home.addresses, self.cache.addresses, self.value_bytes, self.record_bytes, out.ctypes.data,
        )  # fmt: skip
        if odd >= 0:
            raise self._missing(int(payloads.row[odd]))

    def unpack(self, payloads: Payloads, kinds: Kinds, given: Bytes, *, to: Located) -> None:
        """Overwrite records with those that came."""
        odd = unpack_rows(
            payloads.kind, payloads.payload, payloads.table, payloads.row, payloads.offsets, kinds,
            to.addresses, self.value_bytes, self.record_bytes, given.ctypes.data,
        )  # fmt: skip
        if odd >= 0:
            raise self._missing(int(payloads.row[odd]))

    def arrive(self, arrivals: list[tuple[Payloads, Bytes]]) -> None:
        """Let records that came into the cache, and rows that are trained for the first time."""
        plan, needed, cache = self._plan, self._needed, self.cache
        for payloads, _ in arrivals:
            mark_arrivals(payloads.kind, payloads.payload, payloads.row, TO_CACHE, needed, _ARRIVED)
        missing = mark_absent(
            plan.trainers, self._mask, plan.states, cache.records, needed, _ARRIVED, _ABSENT,
            int(State.FRESH), int(State.NOT_ADMITTED),
        )  # fmt: skip
        if missing >= 0:
            raise self._missing(missing)
        cache.add(plan, needed)
        for payloads, given in arrivals:
            self.unpack(payloads, TO_CACHE, given, to=cache)

    def _missing(self, row: int) -> MissingRowError:
        return MissingRowError(
            f"key {int(self._plan.keys[row])} of table number {int(self._plan.tables[row])} is not where the "
            f"plan of iteration {self._plan.iteration} has it; please report this"
        )
