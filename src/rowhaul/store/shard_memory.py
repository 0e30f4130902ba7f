"""The memory of an index's shards: how large each is, when it grows, and who may read what is replaced.

A table begins as one shard, so that many small tables take little room, and is split into 32 once it is
large. These grow one at a time and by a fifth, which bounds both the pause and the extra memory of growing.

Readers take no locks, so memory that is replaced may still be read. What they read by is a copy of all rows,
published together with references to the arrays that it points to: an array goes when the last reader does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.store.shards import (
    ADDRESS,
    LINE_BYTES,
    LINE_SLOTS,
    LOCK,
    MOST_KEYS,
    MOST_SHARD_BITS,
    NUM_KEYS,
    NUM_MOVES,
    ROW_BYTES,
    SHARD_BITS,
    SLOT_BYTES,
    SLOTS,
    count_entries,
    group_entries,
    lock_shard,
    spread,
    unlock_shard,
)

Int64s = npt.NDArray[np.int64]

NUM_SHARDS = 1 << MOST_SHARD_BITS  # of a large table, and rows of any
SPLIT_KEYS = 1 << 18  # a table with more keys is large; splitting one of these takes a few milliseconds
_MOST_FULL = 0.79  # share of the slots; beyond, entries are far from their lines
_FULL_AFTER_GROWING = 0.69
_SMALL = 4096  # keys: smaller shards take longer strides, as each stride is a call
_LARGE_BYTES = 1 << 16  # what a shard of this size leaves behind is given back at once


@dataclass(frozen=True)
class _Size:
    """Lines that keys may want to be in, and further ones for those that the last lines have no room for."""

    num_lines: int
    num_more: int

    @staticmethod
    def of(num_keys: int) -> _Size:
        slots = num_keys / _FULL_AFTER_GROWING * (2 if num_keys < _SMALL else 1)
        num_lines = max(2, -int(-slots // LINE_SLOTS))
        return _Size(num_lines, 2 + min(14, num_lines // 64))

    @property
    def num_slots(self) -> int:
        return (self.num_lines + self.num_more) * LINE_SLOTS


def wait(attempt: int) -> None:
    """Yield to other threads: a lock is held for microseconds, or milliseconds while a shard grows."""
    time.sleep(0 if attempt < 20 else 50e-6)


class ShardMemory:
    """The rows of all shards of all tables, and the arrays they point to."""

    def __init__(self, num_tables: int) -> None:
        self.rows = _aligned(num_tables * NUM_SHARDS * ROW_BYTES // 8).reshape(-1, ROW_BYTES // 8)
        self.rows[:] = 0
        self._shards: list[Int64s | None] = [None] * len(self.rows)
        self._begin()
        for row in range(0, len(self.rows), NUM_SHARDS):
            self._place(row, *_rearranged(0, 0, 0, _Size.of(0)), 0)
        self.publish()

    def _begin(self) -> None:
        self.address = self.rows.ctypes.data
        self._layout = threading.Lock()  # held while rows change what they point to

    def copy(self) -> ShardMemory:
        """The same shards, at other addresses; in this process, as its secret decides where entries are."""
        other = ShardMemory.__new__(ShardMemory)
        other.rows = _aligned_copy(self.rows.reshape(-1)).reshape(self.rows.shape)
        other._shards = [shard if shard is None else _aligned_copy(shard) for shard in self._shards]
        other.rows[:, LOCK] = 0
        other.rows[:, ADDRESS] = [0 if shard is None else _address(shard) for shard in other._shards]
        other._begin()
        other.publish()
        return other

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots, used or not, and of the rows that describe the shards."""
        return int(self.rows[:, SLOTS].sum()) * SLOT_BYTES + 2 * self.rows.nbytes

    def num_shards(self, table: int) -> int:
        """By how many shards a table is held now."""
        return 1 << int(self.rows[table * NUM_SHARDS, SHARD_BITS])

    def publish(self) -> None:
        """Publish the shards to readers; replaced memory is freed with its last reader."""
        with self._layout:
            rows = self.rows.copy()
            self.seen = rows.ctypes.data, rows, list(self._shards)

    @contextmanager
    def locked(self, row: int) -> Iterator[Int64s]:
        """Hold the lock of a shard; its row."""
        address = self.address + ROW_BYTES * row
        attempt = 0
        while not lock_shard(address):
            wait(attempt)
            attempt += 1
        try:
            yield self.rows[row]
        finally:
            unlock_shard(address)

    def make_room(self, row: int, num_more: int, *, end_is_full: bool = False) -> bool:
        """Make room in a shard for ``num_more`` keys; returns whether it had to grow.

        ``end_is_full``: its last entries have no room, however many slots are free elsewhere. Without memory
        nothing is changed. Who calls this publishes; after large ones it is done here.
        """
        with self.locked(row) as state:
            _, address, num_lines, num_slots, num_keys, most_keys, *_ = state.tolist()
            wanted = num_keys + num_more
            size = _Size(num_lines, num_slots // LINE_SLOTS - num_lines)
            shard_bits = int(self.rows[row & -NUM_SHARDS, SHARD_BITS])
            if wanted > most_keys:
                size = _Size.of(wanted)
            elif end_is_full:
                size = _Size(size.num_lines, 2 * size.num_more)
            else:
                return False
            if wanted > SPLIT_KEYS and not shard_bits:
                self._split(row, num_more)
            else:
                end = address + SLOT_BYTES * num_slots
                shard, size = _rearranged(address, end, num_keys, size)
                self._place(row, shard, size, num_keys)
        if size.num_slots * SLOT_BYTES >= _LARGE_BYTES:
            self.publish()
        return True

    def reserve(self, table: int, num_keys: int) -> None:
        """Make room for ``num_keys`` keys of a table in all."""
        first = table * NUM_SHARDS
        if self.num_shards(table) == 1:
            self.make_room(first, num_keys - int(self.rows[first, NUM_KEYS]))
        num_shards = self.num_shards(table)
        share = _largest_share(num_keys, num_shards)
        for row in range(first, first + num_shards):
            self.make_room(row, share - int(self.rows[row, NUM_KEYS]))

    def _split(self, first: int, num_more: int) -> None:
        """Replace a table's only shard, whose lock is held, by all that it can have."""
        old = self.rows[first]
        counts = np.zeros(NUM_SHARDS, np.int64)
        count_entries(int(old[ADDRESS]), int(old[SLOTS]), counts)
        ends = np.cumsum(counts)
        entries = np.empty(2 * int(old[NUM_KEYS]), np.int64)
        group_entries(int(old[ADDRESS]), int(old[SLOTS]), ends - counts, entries)
        made = []
        for count, end in zip(counts.tolist(), (_address(entries) + SLOT_BYTES * ends).tolist(), strict=True):
            size = _Size.of(count + _largest_share(num_more, NUM_SHARDS))
            made.append((*_rearranged(end - SLOT_BYTES * count, end, count, size), count))
        # The first row last: threads that wait for its lock see the others complete.
        for number in reversed(range(NUM_SHARDS)):
            self._place(first + number, *made[number], first if number == 0 else None)

    def _place(self, row: int, shard: Int64s, size: _Size, num_keys: int, split: int | None = None) -> None:
        with self._layout:
            self._shards[row] = shard
            most_keys = int(_MOST_FULL * LINE_SLOTS * size.num_lines)
            self.rows[row, ADDRESS : MOST_KEYS + 1] = (
                _address(shard), size.num_lines, size.num_slots, num_keys, most_keys,
            )  # fmt: skip
            if split is not None:
                self.rows[split, SHARD_BITS] = MOST_SHARD_BITS
            self.rows[0, NUM_MOVES] += 1  # before its lock is released: readers compare this in between


def _largest_share(num_keys: int, num_shards: int) -> int:
    """An upper bound on one shard's part of ``num_keys`` keys, which hashing spreads unevenly."""
    mean = num_keys / num_shards
    return num_keys if num_shards == 1 else int(mean + 4 * mean**0.5) + 1


def _rearranged(old: int, old_end: int, num_entries: int, size: _Size) -> tuple[Int64s, _Size]:
    """A new shard of an old one's entries, and its size, which is at least the given one."""
    while True:
        shard = _aligned(2 * size.num_slots)
        if spread(old, old_end, num_entries, shard, size.num_lines):
            return shard, size
        size = _Size(size.num_lines, 2 * size.num_more)


def _aligned(num_words: int) -> Int64s:
    """Words that begin with a cache line, as lines of a shard must."""
    memory = np.empty(num_words + LINE_BYTES // 8, dtype=np.int64)
    first = -_address(memory) % LINE_BYTES // 8
    return memory[first : first + num_words]


def _address(words: Int64s) -> int:
    address: int = words.__array_interface__["data"][0]  # the quickest way to it
    return address


def _aligned_copy(words: Int64s) -> Int64s:
    copy = _aligned(len(words))
    copy[:] = words
    return copy
