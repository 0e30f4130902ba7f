"""Which rows were ever trained: two to four bytes a row, however many there are.

A FRESH row needs no transfer, so ranks must know which rows they have seen. A filter may say "seen"
of a row that is not (about one in a hundred): it is then pulled, and the home makes it. It never
forgets. The answer is the same on every rank, which is all that exactness needs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_read, prefetch_to_write
from rowhaul.schedule.arrays import Arrays, Saved
from rowhaul.schedule.threads import Counter, Threads, bounds, take
from rowhaul.schedule.topology import row_hash

BITS_PER_ROW = 16
SMALLEST_ROWS = 1 << 15
PROBES = 6
BLOCK_WORDS = 8  # all probes of a row fall into one cache line
ROWS_AT_ONCE = 16384  # that a thread looks for
AHEAD = 16  # rows between asking for a cache line and using it


class SeenRows:
    """A growing set of rows: blocked Bloom filters, each twice the size of the one before."""

    def __init__(self, threads: Threads | None = None) -> None:
        self._threads = threads or Threads()
        self._filters: list[npt.NDArray[np.uint64]] = []
        self._room = 0
        self._add_filter(SMALLEST_ROWS)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the set takes."""
        return sum(words.nbytes for words in self._filters)

    @property
    def num_full(self) -> int:
        """Filters that no longer change."""
        return len(self._filters) - 1

    def add(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64], absent_from: int = 0) -> None:
        """Add rows; those already there take no room.

        The first ``absent_from`` filters are known to contain none of them: `num_full` when `contains` said
        so.
        """
        hashes = filter_hashes(tables, keys)
        hashes = hashes[~self._contains(hashes, absent_from)]
        while len(hashes):
            added, used = insert_rows(self._filters[-1], hashes, self._room)
            self._room -= added
            hashes = hashes[used:]
            if self._room == 0:
                self._add_filter(2 * len(self._filters[-1]) * 64 // BITS_PER_ROW)

    def contains(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether each row was added (or, rarely, looks as if)."""
        return self._contains(filter_hashes(tables, keys))

    def export(self) -> Arrays:
        """The filters as plain arrays."""
        filters = {str(number): words.copy() for number, words in enumerate(self._filters)}
        return {"room": np.array([self._room]), **filters}

    def restore(self, saved: Saved) -> None:
        """Replace the set by an exported one."""
        self._filters.clear()
        rows = SMALLEST_ROWS
        while not self._filters or str(len(self._filters)) in saved:
            num_words = rows * BITS_PER_ROW // 64
            self._filters.append(saved.array(str(len(self._filters)), np.uint64, num_words))
            rows *= 2
        self._room = int(saved.array("room", np.int64, 1, below=rows // 2 + 1)[0])

    def _contains(self, hashes: npt.NDArray[np.uint64], absent_from: int = 0) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(hashes), np.bool_)
        edges = bounds(len(hashes), ROWS_AT_ONCE)

        def find(counter: Counter) -> None:
            while (chunk := take_chunk(counter)) < len(edges) - 1:
                part = slice(edges[chunk], edges[chunk + 1])
                for words in self._filters[absent_from:]:
                    find_rows(words, hashes[part], found[part])

        self._threads.share(find, len(edges) - 1)
        return found

    def _add_filter(self, rows: int) -> None:
        self._filters.append(np.zeros(rows * BITS_PER_ROW // 64, np.uint64))
        self._room = rows


@kernel
def take_chunk(counter):
    """`take` for threads outside kernels."""
    return take(counter)


@kernel
def filter_hashes(tables, keys):
    """Hashes of rows that all filters take their bits from."""
    hashes = np.empty(len(keys), np.uint64)
    for r in range(len(keys)):
        h = row_hash(tables[r], keys[r])
        # A second mix: the block must not repeat the bits that choose a row's home.
        h = (h ^ np.uint64(0xD6E8FEB86659FD93)) * np.uint64(0xD6E8FEB86659FD93)
        hashes[r] = h ^ (h >> np.uint64(32))
    return hashes


@kernel
def insert_rows(words, hashes, room):
    """Set the bits of rows until ``room`` new ones are in; returns the new ones and the rows handled."""
    words_address = np.int64(words.ctypes.data)
    added = 0
    for r in range(len(hashes)):
        if added == room:
            return added, r
        if r + AHEAD < len(hashes):
            prefetch_to_write(words_address + _first_word(words, hashes[r + AHEAD]) * 8)
        first, bits = _first_word(words, hashes[r]), _bits(hashes[r])
        new = False
        for _ in range(PROBES):
            word = first + np.int64((bits >> np.uint64(6)) & np.uint64(BLOCK_WORDS - 1))
            bit = np.uint64(1) << (bits & np.uint64(63))
            new |= words[word] & bit == 0
            words[word] |= bit
            bits >>= np.uint64(9)
        added += new
    return added, len(hashes)


@kernel
def find_rows(words, hashes, found):
    """Mark as found the rows all of whose bits are set."""
    words_address = np.int64(words.ctypes.data)
    for r in range(len(hashes)):
        if r + AHEAD < len(hashes):
            prefetch_to_read(words_address + _first_word(words, hashes[r + AHEAD]) * 8)
        first, bits = _first_word(words, hashes[r]), _bits(hashes[r])
        # Two bits rule out most absent rows; one alone would be mispredicted too often.
        if _are_set(words, first, bits, np.int64(2)):
            found[r] |= _are_set(words, first, bits >> np.uint64(18), PROBES - 2)


@kernel
def _are_set(words, first, bits, probes):
    every = np.uint64(1)
    for _ in range(probes):
        word = first + np.int64((bits >> np.uint64(6)) & np.uint64(BLOCK_WORDS - 1))
        every &= words[word] >> (bits & np.uint64(63))
        bits >>= np.uint64(9)
    return every != 0


@kernel
def _first_word(words, filter_hash):
    """Where a row's block begins; filters have a power of two of them."""
    blocks = np.uint64(len(words) // BLOCK_WORDS)
    return np.int64((filter_hash & (blocks - np.uint64(1))) * np.uint64(BLOCK_WORDS))


@kernel
def _bits(filter_hash):
    """Nine bits for each probe, the lowest first."""
    return filter_hash * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(9)
