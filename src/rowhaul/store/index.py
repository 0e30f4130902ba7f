"""From any int64 key to the location of its row's record: sorted shards with gaps (see `shards`).

Nothing is pre-indexed and nothing collides: a slot keeps the whole key. Several tables share one index
object, so that a batch over all of them is one pass. A table begins as one shard, so that many small tables
take little room, and is split into 32 once it is large; these grow one at a time and by a fifth, which
bounds both the pause and the extra memory of growing.

Every call may run beside any other, in any thread. Lookups take no locks; changes lock a shard once for all
of a batch's keys in it. Two threads that insert the same new key get the same location.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.store.arena import OutOfMemoryError
from rowhaul.store.index_kernels import (
    BUSY,
    DISCARD,
    INSERT,
    change_keys,
    find_each_key,
    find_keys,
    group_keys,
)
from rowhaul.store.location import ABSENT
from rowhaul.store.shard_memory import NUM_SHARDS, ShardMemory, wait
from rowhaul.store.shards import (
    ADDRESS,
    MOST_KEYS,
    MOST_SHARD_BITS,
    NUM_KEYS,
    SHARD_BITS,
    SLOTS,
    list_entries,
    unmix_all,
)

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class _Grouped:
    """Keys of a batch brought together by shard, as `group_keys` describes it."""

    table_bits: Int64s
    words: npt.NDArray[np.uint64]
    items: Int64s
    bounds: Int64s  # rows x (next, end)
    pending: Int64s


class KeyIndex:
    """Locations of the keys of ``num_tables`` tables.

    Batches give keys table by table: those of table ``t`` are ``keys[starts[t]:starts[t + 1]]``. A location
    is any number that is not negative.
    """

    def __init__(self, num_tables: int) -> None:
        self.num_tables = num_tables
        self._memory = ShardMemory(num_tables)
        self._begun = itertools.count()

    def __deepcopy__(self, memo: Any) -> KeyIndex:
        copy = KeyIndex.__new__(KeyIndex)
        copy.num_tables, copy._memory, copy._begun = self.num_tables, self._memory.copy(), itertools.count()
        return copy

    def __getstate__(self) -> list[list[tuple[Int64s, Int64s]]]:
        return [list(self.blocks(table)) for table in range(self.num_tables)]

    def __setstate__(self, tables: list[list[tuple[Int64s, Int64s]]]) -> None:
        # Maybe from another process, which has another secret: entries have other places here.
        KeyIndex.__init__(self, len(tables))
        self.reserve([sum(len(keys) for keys, _ in blocks) for blocks in tables])
        for table, blocks in enumerate(tables):
            for keys, locations in blocks:
                starts = np.where(np.arange(len(tables) + 1) > table, len(keys), 0)
                self.add(keys, starts, np.arange(len(keys)), locations)

    @property
    def num_keys(self) -> Int64s:
        """Keys held, by table."""
        counts: Int64s = self._memory.rows[:, NUM_KEYS].reshape(self.num_tables, NUM_SHARDS).sum(axis=1)
        return counts

    @property
    def num_slots(self) -> int:
        """Slots of all tables, used or not."""
        return int(self._memory.rows[:, SLOTS].sum())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots, used or not, and of what describes the shards."""
        return self._memory.allocated_bytes

    def find(self, keys: Int64s, starts: Int64s) -> tuple[Int64s, np.int64]:
        """Location of each key (-1 where absent), and the number of absent keys."""
        locations = np.empty(len(keys), dtype=np.int64)
        seen, *_in_use = self._memory.seen  # what is read stays alive with it
        num_busy, num_absent = find_keys(self._memory.address, seen, starts, keys, locations)
        if num_busy:
            left = np.flatnonzero(locations == BUSY)
            tables = np.searchsorted(starts, left, side="right") - 1
            locations[left] = self.find_each(tables, keys[left])
            num_absent += int(np.count_nonzero(locations[left] == ABSENT))
        return locations, np.int64(num_absent)

    def find_each(self, tables: Int64s, keys: Int64s) -> Int64s:
        """Location of each key of the table given with it (-1 where absent), in any order."""
        locations = np.empty(len(keys), dtype=np.int64)
        seen, *_in_use = self._memory.seen
        num_busy = find_each_key(self._memory.address, seen, tables, keys, locations)
        attempt = 0
        while num_busy:
            wait(attempt)
            attempt += 1
            left = np.flatnonzero(locations == BUSY)
            seen, *_in_use = self._memory.seen
            again = np.empty(len(left), dtype=np.int64)
            num_busy = find_each_key(self._memory.address, seen, tables[left], keys[left], again)
            locations[left] = again
        return locations

    def read_by_kernels(self) -> tuple[int, int, Any]:
        """What `find_each_key` reads; and what must stay alive meanwhile."""
        seen, *in_use = self._memory.seen
        return self._memory.address, seen, in_use

    def find_or_insert(
        self,
        keys: Int64s,
        starts: Int64s,
        allocate: Callable[[Int64s], Int64s],
        release: Callable[[Int64s], object],
    ) -> tuple[Int64s, Bools]:
        """Location of each key, absent ones inserted; and which are new. Keys may repeat.

        ``allocate`` gets the positions of absent keys, in order, and returns a location for each. Others may
        find a key as soon as it is inserted, so the records should be filled in there. ``release`` gets
        those back that were not needed, because another thread was first or a key repeats; or all, if the
        index finds no memory: nothing is inserted then.
        """
        locations, num_absent = self.find(keys, starts)
        is_new = np.zeros(len(keys), dtype=np.bool_)
        if num_absent:
            absent = np.flatnonzero(locations == ABSENT)
            records = allocate(absent)
            try:
                held = self.add(keys, starts, absent, records)
            except BaseException:
                release(records)
                raise
            locations[absent] = held
            was_added = held == records
            is_new[absent] = was_added
            if not was_added.all():
                release(records[~was_added])
        return locations, is_new

    def add(self, keys: Int64s, starts: Int64s, absent: Int64s, records: Int64s) -> Int64s:
        """Give key ``keys[absent[i]]`` location ``records[i]``, unless it has one; returns what it has.

        All or nothing: without memory, no key is added. ``absent`` ascends.
        """
        locations = np.full(len(absent), ABSENT, dtype=np.int64)
        try:
            self._change(INSERT, keys, starts, absent, records, locations)
        except MemoryError:
            added = np.flatnonzero(locations == records)
            self._change(DISCARD, keys, starts, absent[added], records, np.empty(len(added), np.int64))
            raise OutOfMemoryError(
                f"no memory for the index of {int(self.num_keys.sum()) + len(absent):,} keys "
                f"({self.allocated_bytes:,} bytes are held); use a larger machine"
            ) from None
        return locations

    def insert(
        self, keys: Int64s, starts: Int64s, locations: Int64s, num_absent: np.int64, records: Int64s
    ) -> Int64s:
        """Give the keys that `find` did not find, which must differ, the ``records`` in order.

        Fills their ``locations`` and returns which keys they are. For one writer: nobody may have inserted
        them since.
        """
        absent = np.flatnonzero(locations == ABSENT) if num_absent else _NONE
        locations[absent] = self.add(keys, starts, absent, records)
        return absent

    def discard(self, keys: Int64s, starts: Int64s) -> Int64s:
        """Forget keys; returns the locations they had, -1 where absent. Of several threads one gets it."""
        locations = np.empty(len(keys), dtype=np.int64)
        self._change(DISCARD, keys, starts, np.arange(len(keys)), locations, locations)
        return locations

    def delete(self, keys: Int64s, starts: Int64s) -> Int64s:
        """Forget the given keys, which must be there and differ; returns the locations they had."""
        locations, num_absent = self.find(keys, starts)
        if num_absent:
            raise KeyError(int(keys[np.flatnonzero(locations == ABSENT)[0]]))
        return self.discard(keys, starts)

    def reserve(self, num_keys: npt.ArrayLike) -> None:
        """Make room for this many keys in each table, so that inserting them grows nothing."""
        wanted = np.asarray(num_keys, dtype=np.int64)
        if wanted.shape != (self.num_tables,):
            raise ConfigError(
                f"reserve was given numbers of keys of shape {wanted.shape}; it needs one for each of the "
                f"{self.num_tables} tables"
            )
        try:
            for table, count in enumerate(wanted.tolist()):
                self._memory.reserve(table, count)
        except MemoryError:
            raise OutOfMemoryError(
                f"no memory to reserve the index of {int(wanted.sum()):,} keys (about 23 bytes each); "
                f"reserve fewer or use a larger machine"
            ) from None
        finally:
            self._memory.publish()

    def blocks(self, table: int) -> Iterator[tuple[Int64s, Int64s]]:
        """All (keys, locations) of a table, a shard at a time.

        By mixed key: in no meaningful order, but in the same one in every process.
        """
        row, end = table * NUM_SHARDS, table * NUM_SHARDS + 1
        while row < end:
            with self._memory.locked(row) as state:
                end = table * NUM_SHARDS + self._memory.num_shards(table)
                mixed, locations = np.empty(state[NUM_KEYS], np.uint64), np.empty(state[NUM_KEYS], np.int64)
                list_entries(int(state[ADDRESS]), int(state[SLOTS]), mixed, locations)
            order, keys = np.argsort(mixed), np.empty(len(mixed), np.int64)
            unmix_all(mixed, order, keys)
            yield keys, locations[order]
            row += 1

    def _change(
        self, operation: int, keys: Int64s, starts: Int64s, positions: Int64s, given: Int64s, results: Int64s
    ) -> None:
        """Insert or discard the keys at ``positions``; fills ``results`` as far as it comes."""
        grouped = self._group(keys, starts, positions)
        if operation == INSERT:
            while self._make_room(grouped):  # first, so that nothing can fail later
                grouped = self._group(keys, starts, positions)
        # Batches that begin with different shards do not wait for each other at the first.
        begin = next(self._begun) * 5 % max(1, len(grouped.pending))
        pending = np.concatenate([grouped.pending[begin:], grouped.pending[:begin]])
        attempt = 0
        while len(pending):
            num_pending, stopped = change_keys(
                operation, self._memory.address, grouped.table_bits, grouped.words, grouped.items,
                grouped.bounds, pending, given, results,
            )  # fmt: skip
            pending = pending[:num_pending]
            if stopped < 0:
                if num_pending:
                    wait(attempt)
                    attempt += 1
                continue
            first, end = grouped.bounds[stopped]
            table = stopped >> MOST_SHARD_BITS
            if self._memory.num_shards(table) == 1 << grouped.table_bits[table]:
                self._memory.make_room(stopped, end - first, end_is_full=True)
                self._memory.publish()
            if self._memory.num_shards(table) != 1 << grouped.table_bits[table]:
                items = grouped.items[first:end]
                rest = np.empty(len(items), np.int64)
                self._change(operation, keys, starts, positions[items], given[items], rest)
                results[items] = rest
                pending = pending[pending != stopped]

    def _group(self, keys: Int64s, starts: Int64s, positions: Int64s) -> _Grouped:
        num_rows = self.num_tables * NUM_SHARDS
        grouped = _Grouped(
            table_bits=np.empty(self.num_tables, np.int64),
            words=np.empty(len(positions), np.uint64),
            items=np.empty(len(positions), np.int64),
            bounds=np.zeros((num_rows, 2), np.int64),
            pending=np.empty(num_rows, np.int64),
        )
        num_pending = group_keys(
            self._memory.address, keys, starts, positions, grouped.table_bits, grouped.words, grouped.items,
            grouped.bounds, grouped.pending,
        )  # fmt: skip
        return replace(grouped, pending=grouped.pending[:num_pending])

    def _make_room(self, grouped: _Grouped) -> bool:
        """Grow the shards that lack room; true if a table was split."""
        rows, bounds = grouped.pending, grouped.bounds[grouped.pending]
        counts = bounds[:, 1] - bounds[:, 0]
        lacking = self._memory.rows[rows, NUM_KEYS] + counts > self._memory.rows[rows, MOST_KEYS]
        if not lacking.any():
            return False
        try:
            for row, count in zip(rows[lacking].tolist(), counts[lacking].tolist(), strict=True):
                self._memory.make_room(row, count)
        finally:
            self._memory.publish()
        bits = self._memory.rows[::NUM_SHARDS, SHARD_BITS]
        return bool((bits != grouped.table_bits).any())
