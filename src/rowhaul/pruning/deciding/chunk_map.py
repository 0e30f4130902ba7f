"""Which chunks of which rows there are: the same in one process and on a cluster, since ids alone decide.

The map tracks rows by key. A row that a training batch reads first gets an entry, and all its chunks while
there is room: the most read of the batch first. Every so often `prune` decides again. Where chunks are is
somebody else's concern: a slot of an entry holds whatever `ChunkMemory` returned for the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from rowhaul.pruning.deciding.decision import Decision, KnownRows, Room, decide, first_by
from rowhaul.pruning.deciding.entries import ABSENT, THERE, Entries, Slots
from rowhaul.pruning.deciding.hashing import DistinctCounter, mixed, salt_of
from rowhaul.pruning.deciding.located import Located
from rowhaul.pruning.deciding.room import LEAST_ENTRIES, Sizes, check_batch, room_for
from rowhaul.pruning.settings import PruneSettings
from rowhaul.store.index import KeyIndex

Int64s = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]


class ChunkMemory(Protocol):
    """Holds the chunks of a map."""

    def admit(self, tables: Int64s, keys: Int64s, places: Int64s) -> Int64s:
        """Make chunks as they begin; returns a slot for each, at least 0."""

    def evict(self, slots: Int64s) -> None:
        """Drop chunks."""


@dataclass(frozen=True)
class Chunks:
    """Chunks by table, key and place in the row."""

    tables: Int64s
    keys: Int64s
    places: Int64s

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Pruned:
    """What a pruning has changed."""

    evicted: Chunks
    admitted: Chunks
    decision: Decision


@dataclass(frozen=True)
class TrackedRows:
    """All rows of a map."""

    tables: Int64s
    keys: Int64s
    numbers: Int64s  # of their entries


def row_seeds(names: Sequence[str], seed: int) -> npt.NDArray[np.uint64]:
    """The seeds that the rows of tables are drawn from, as `TableGroup` has them."""
    return np.array(
        [xxhash.xxh64_intdigest(name.encode(), seed=seed & (2**64 - 1)) for name in names], np.uint64
    )


def compacted(index: KeyIndex) -> KeyIndex:
    """Copy an index into as little room as it needs: shards never shrink by themselves.

    Otherwise every table would keep the room of its best days, and all of them more than a budget allows.
    """
    other = KeyIndex(index.num_tables)
    tables = np.arange(index.num_tables + 1)
    for table in range(index.num_tables):
        for keys, locations in index.blocks(table):
            other.add(keys, np.where(tables > table, len(keys), 0), np.arange(len(keys)), locations)
    return other


class ChunkMap:
    """The rows that are tracked, their chunks and utilities.

    Args:
        tables: their names; all have rows of one size.
        settings: of pruning.
        sizes: bytes of the parts of a row.
        seed: of rows, and of the samples that thresholds are taken from.
        budget: bytes for these tables, if there is a budget.
        memory: of the chunks; none: they are somewhere else, and a slot only says that its chunk exists.
        least_entries: how many rows may always be tracked.
    """

    def __init__(
        self,
        tables: Sequence[str],
        settings: PruneSettings,
        sizes: Sizes,
        seed: int,
        *,
        budget: int | None = None,
        memory: ChunkMemory | None = None,
        least_entries: int = LEAST_ENTRIES,
    ) -> None:
        self.settings, self.sizes, self.num_chunks = settings, sizes, settings.chunks
        self.seeds = row_seeds(tables, seed)
        self._seed, self._least_entries = seed, least_entries
        self._budget = settings.budget if budget is None else budget
        self._memory = memory
        self.entries = Entries(settings)
        self._num_left = self._num_came = 0  # how often entries left (or all were replaced), and came
        self.clear()

    def clear(self) -> None:
        """Forget every row; the memory is its owner's to clear."""
        self.index = KeyIndex(len(self.seeds))
        self.entries = Entries(self.settings, self.entries.for_training)
        self.counter = DistinctCounter()
        self.num_rows = 0  # different rows seen so far, estimated once some are not tracked
        self.is_complete = True  # whether every row seen so far is tracked
        self.pruned_at = 0  # steps before the latest pruning
        self.num_rows_pruned = 0  # rows seen by then
        self.num_turned_away = 0  # sightings of rows that got no entry, since then
        self.num_held = 0  # chunks
        self.latest: Pruned | None = None
        self._num_left += 1

    @property
    def num_entries(self) -> int:
        """Rows that are tracked."""
        return self.entries.arena.num_records

    @property
    def room(self) -> Room:
        """What may be held now."""
        return room_for(self.settings, self._budget, self.sizes, self.num_rows, self._least_entries)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of index and entries."""
        return self.index.allocated_bytes + self.entries.arena.allocated_bytes

    def locate(self, keys: Int64s, starts: Int64s, inverse: npt.NDArray[np.int32]) -> Located:
        """Find the entries of distinct keys, given table by table; ``inverse`` is the key of each id.

        May run in any thread, while another one changes the map: see `refresh`.
        """
        version = self._num_left, self._num_came  # from before: later changes are looked at again
        return Located(keys, starts, inverse, self.index.find(keys, starts)[0], version)

    def refresh(self, located: Located) -> None:
        """Bring up to date what was found some time ago."""
        now = self._num_left, self._num_came
        if located.version[0] != now[0]:
            located.entries = self.index.find(located.keys, located.starts)[0]
        elif located.version != now:
            absent = np.flatnonzero(located.entries < 0)
            keys = np.ascontiguousarray(located.keys[absent])
            located.entries[absent] = self.index.find(keys, np.searchsorted(absent, located.starts))[0]
        located.version = now

    def add_new(self, located: Sequence[Located], iteration: int) -> None:
        """Track rows that the batch of an iteration (from 0) reads first, and give them chunks.

        Where not all have room, rows that the batch reads most often come first, then by a hash that changes
        with the iteration. ``located`` are parts of the batch without a row in common.
        """
        check_batch(self.settings, self._budget, self.sizes, sum(len(one.keys) for one in located))
        num_absent = sum(
            self.counter.add_absent(one.keys, one.entries, one.starts, self.seeds) for one in located
        )
        if not num_absent:
            return
        if self.is_complete:
            self.num_rows = self.num_entries + num_absent
        else:
            self.num_rows = max(self.num_rows, self.counter.estimate())
        num_free = max(self.room.num_entries - self.num_entries, 0)
        if num_absent > num_free:
            self.is_complete = False
            self.num_turned_away += num_absent - num_free
        if num_free:
            self._add(located, min(num_free, num_absent), iteration)

    def _add(self, located: Sequence[Located], count: int, iteration: int) -> None:
        absent = [np.flatnonzero(one.entries < 0) for one in located]
        parts = list(zip(located, absent, strict=True))
        tables = np.concatenate([one.tables(which) for one, which in parts])
        keys = np.concatenate([one.keys[which] for one, which in parts])
        num_free = max(self.room.num_chunks - self.num_held, 0)
        chosen, given = np.arange(len(keys)), np.full(count, self.num_chunks)
        if count < len(keys) or count * self.num_chunks > num_free:
            accesses = np.concatenate([one.counts[which] for one, which in parts])
            drawn = mixed(self._hashes(tables, keys) ^ salt_of(self._seed, iteration))
            by_reads = first_by(-accesses, drawn, count)
            given = np.clip(num_free - self.num_chunks * np.arange(count), 0, self.num_chunks)
            given, chosen = given[np.argsort(by_reads)], np.sort(by_reads)
        numbers = self.entries.add(count, iteration)
        ends = np.cumsum([0, *map(len, absent)])
        for (one, which), (begin, end) in zip(parts, pairwise(ends), strict=True):
            some = slice(*np.searchsorted(chosen, [begin, end]))
            positions = which[chosen[some] - begin]
            one.entries[positions] = self.index.add(one.keys, one.starts, positions, numbers[some])
        slots = np.full((count, self.num_chunks), ABSENT, np.int32)
        self._fill(slots, np.arange(self.num_chunks) < given[:, None], tables[chosen], keys[chosen])
        self.entries.set_slots(numbers, slots)
        self._num_came += 1

    def _fill(self, slots: Slots, admit: npt.NDArray[np.bool_], tables: Int64s, keys: Int64s) -> Chunks:
        """Give the slots of some chunks something to hold."""
        rows, places = np.nonzero(admit)
        chunks = Chunks(tables[rows], keys[rows], places)
        slots[admit] = self._memory.admit(chunks.tables, chunks.keys, places) if self._memory else THERE
        self.num_held += len(chunks)
        return chunks

    def is_due(self, now: int) -> bool:
        """Whether rows are to be pruned after step ``now``."""
        has_grown = self.num_turned_away > 0 and self.num_rows >= 2 * self.num_rows_pruned
        return self.settings.is_stop(now) and (has_grown or now % self.settings.period == 0)

    def prune(self, now: int) -> Pruned:
        """Decide after step ``now``, and carry it out."""
        rows = self.rows()
        slots, _ = self.entries.slots(rows.numbers)
        utilities = self.entries.utilities(rows.numbers, now)
        if self.settings.by_access:
            utilities = utilities.astype(np.int64)  # to be negated
        known = KnownRows(self._hashes(rows.tables, rows.keys), utilities, slots >= 0)
        decision = decide(known, self.settings, self.room, self._seed, now)
        at, places = np.nonzero(decision.evict)
        if self._memory:
            self._memory.evict(slots[decision.evict].astype(np.int64))
        self.num_held -= len(at)
        slots[decision.evict] = ABSENT
        admitted = self._fill(slots, decision.admit, rows.tables, rows.keys)
        changed = np.flatnonzero((decision.evict | decision.admit).any(axis=1))
        self.entries.set_slots(rows.numbers[changed], slots[changed])
        self._forget(rows, decision.forget)
        self.pruned_at, self.num_rows_pruned, self.num_turned_away = now, self.num_rows, 0
        evicted = Chunks(rows.tables[at], rows.keys[at], places)
        self.latest = Pruned(evicted, admitted, decision)
        return self.latest

    def _forget(self, rows: TrackedRows, which: Int64s) -> None:
        if not len(which):
            return
        starts = np.searchsorted(rows.tables[which], np.arange(len(self.seeds) + 1))
        numbers = self.index.delete(np.ascontiguousarray(rows.keys[which]), starts)
        self.entries.arena.release(np.sort(numbers)[::-1])
        self.index = compacted(self.index)
        self.is_complete = False
        self._num_left += 1

    def rows(self) -> TrackedRows:
        """All rows, table by table, in any order."""
        tables, keys, numbers = zip(
            *((table, *block) for table in range(len(self.seeds)) for block in self.index.blocks(table)),
            strict=True,
        )
        return TrackedRows(
            np.repeat(tables, list(map(len, keys))), np.concatenate(keys), np.concatenate(numbers)
        )

    def load(
        self, table: int, keys: Int64s, slots: Slots, utilities: npt.NDArray[Any], touched: npt.NDArray[Any]
    ) -> None:
        """Track rows of a table that are not tracked yet."""
        self.put(np.full(len(keys), table), keys, self.entries.add(len(keys), 0), slots, utilities, touched)

    def put(
        self, tables: Int64s, keys: Int64s, numbers: Int64s, slots: Slots, utilities: npt.NDArray[Any],
        touched: npt.NDArray[Any],
    ) -> None:  # fmt: skip
        """Track rows, given table by table, under these numbers of entries."""
        starts = np.searchsorted(tables, np.arange(len(self.seeds) + 1))
        self.index.add(keys, starts, np.arange(len(keys)), numbers)
        self.entries.set_slots(numbers, slots)
        self.entries.load_utilities(numbers, utilities, touched)
        self.num_held += int(np.count_nonzero(slots >= 0))
        self._num_came += 1

    def known(self, iteration: int, awaits_columns: bool) -> Arrays:
        """Return what a checkpoint has of this map beside rows; see `restore`."""
        numbers = [self.num_rows, self.is_complete, iteration, self.pruned_at, self.num_turned_away]
        numbers += [awaits_columns, self.num_rows_pruned]
        return {"registers": self.counter.registers.copy(), "numbers": np.array(numbers, np.int64)}

    def restore(self, numbers: Int64s, registers: npt.NDArray[np.uint8]) -> None:
        """Continue with what was `known`."""
        self.num_rows, is_complete, _, self.pruned_at, self.num_turned_away, _, self.num_rows_pruned = (
            numbers.tolist()
        )
        self.is_complete = bool(is_complete)
        self.counter.registers[:] = registers

    def drop_utilities(self) -> None:
        """Keep only what reading needs."""
        self.entries.drop_utilities()
        self._num_left += 1

    def _hashes(self, tables: Int64s, keys: Int64s) -> npt.NDArray[np.uint64]:
        """A number for each row that is the same everywhere: what its first values are drawn from."""
        return mixed(keys.view(np.uint64) ^ self.seeds[tables])
