"""Which rows were ever trained: two to four bytes a row, however many there are.

A FRESH row needs no transfer, so ranks must know which rows they have seen. A filter may say "seen"
of a row that is not (about one in a hundred): it is then pulled, and the home makes it. It never
forgets. The answer is the same on every rank, which is all that exactness needs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.schedule.kernels import row_hash
from rowhaul.schedule.saved import Arrays, Saved

BITS_PER_ROW = 16
SMALLEST_ROWS = 1 << 15
PROBES = 6
BLOCK_WORDS = 8  # all probes of a row fall into one cache line


class SeenRows:
    """A growing set of rows: blocked Bloom filters, each twice the size of the one before."""

    def __init__(self) -> None:
        self._filters: list[npt.NDArray[np.uint64]] = []
        self._room = 0
        self._add_filter(SMALLEST_ROWS)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the set takes."""
        return sum(words.nbytes for words in self._filters)

    def add(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        """Add rows; those already there take no room."""
        new = ~self.contains(tables, keys)
        tables, keys = tables[new], keys[new]
        while len(keys):
            added, used = insert_rows(self._filters[-1], tables, keys, self._room)
            self._room -= added
            tables, keys = tables[used:], keys[used:]
            if self._room == 0:
                self._add_filter(2 * len(self._filters[-1]) * 64 // BITS_PER_ROW)

    def contains(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether each row was added (or, rarely, looks as if)."""
        found = np.zeros(len(keys), np.bool_)
        for words in reversed(self._filters):  # most rows are in the largest
            find_rows(words, tables, keys, found)
        return found

    def export(self) -> Arrays:
        """The filters as plain arrays."""
        filters = {str(number): words.copy() for number, words in enumerate(self._filters)}
        return {"room": np.array([self._room]), **filters}

    def restore(self, saved: Saved) -> None:
        """Remember what the set knew where `export` was called, and nothing else."""
        self._filters.clear()
        rows = SMALLEST_ROWS
        while not self._filters or str(len(self._filters)) in saved:
            num_words = rows * BITS_PER_ROW // 64
            self._filters.append(saved.array(str(len(self._filters)), np.uint64, num_words))
            rows *= 2
        self._room = int(saved.array("room", np.int64, 1, below=rows // 2 + 1)[0])

    def _add_filter(self, rows: int) -> None:
        self._filters.append(np.zeros(rows * BITS_PER_ROW // 64, np.uint64))
        self._room = rows


@kernel
def insert_rows(words, tables, keys, room):
    """Set the bits of rows until ``room`` new ones are in; returns the new ones and the rows handled."""
    added = 0
    for r in range(len(keys)):
        if added == room:
            return added, r
        first, bits = _block(words, tables[r], keys[r])
        new = False
        for _ in range(PROBES):
            word = first + np.int64((bits >> np.uint64(6)) & np.uint64(BLOCK_WORDS - 1))
            bit = np.uint64(1) << (bits & np.uint64(63))
            if words[word] & bit == 0:
                words[word] |= bit
                new = True
            bits >>= np.uint64(9)
        added += new
    return added, len(keys)


@kernel
def find_rows(words, tables, keys, found):
    """Mark as found the rows all of whose bits are set."""
    for r in range(len(keys)):
        if found[r]:
            continue
        first, bits = _block(words, tables[r], keys[r])
        everything = True
        for _ in range(PROBES):
            word = first + np.int64((bits >> np.uint64(6)) & np.uint64(BLOCK_WORDS - 1))
            if words[word] & (np.uint64(1) << (bits & np.uint64(63))) == 0:
                everything = False
                break
            bits >>= np.uint64(9)
        found[r] = everything


@kernel
def _block(words, table, key):
    h = row_hash(table, key)
    blocks = np.uint64(len(words) // BLOCK_WORDS)
    # A second mix: the block must not repeat the bits that choose a row's home or its place in the index.
    h = (h ^ np.uint64(0xD6E8FEB86659FD93)) * np.uint64(0xD6E8FEB86659FD93)
    h ^= h >> np.uint64(32)
    first = np.int64((h % blocks) * np.uint64(BLOCK_WORDS))
    return first, h * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(9)
