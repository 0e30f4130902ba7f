"""Rows that start small and grow: the memory of an ESAPN-style method (Liu et al., 2020).

A row has one of a few sizes at a time and lies in the arena of that size; an entry by its key says which, how
often it was read and how large its gradients have been since it last grew. Rows never shrink. ESAPN lets a
policy network decide; here thresholds do, on what its network sees: popularity and how well the row is
trained. And it knows no limit of memory; here growing stops at a share of the values that whole rows would
have. No row is smaller than the smallest size, so not every share can be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning.deciding.entries import BLOCK_BYTES
from rowhaul.pruning.deciding.hashing import mixed
from rowhaul.store.arena import RecordArena
from rowhaul.store.keyed import add_absent
from rowhaul.store.tables import TableGroup, TableSpec

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

LEVEL, RECORD, READS, QUALITY = range(4)  # an entry: three numbers and a float32
READS_PER_VALUE = 1  # a row may have as many values as it was read times this
UNTRAINED = 0.25  # of the rows popular enough, the quarter with the smallest gradients stays as it is
_STEP = 0x9E3779B97F4A7C15

Widen = Callable[[int, int, Floats], Floats]
"""Given level, table and values: what rows have as values on the next level."""


@dataclass
class Read:
    """The distinct rows of a batch and where they are; an entry of -1: never trained."""

    keys: Int64s
    starts: Int64s
    inverse: npt.NDArray[np.int32]
    entries: Int64s
    held: npt.NDArray[np.int32]  # rows x entry


class GrowingRows(TableGroup):
    """Tables whose rows have one of ``sizes``; the group's own arena holds the smallest.

    Args:
        tables: with the smallest size as their dim.
        optimizer: of rows, its state must be one number a row or as wide as a row.
        seed: of first values.
        sizes: ascending; the last is the size of a whole row.
        share: of the values of whole rows that may be held.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: RowOptimizerRule,
        seed: int,
        sizes: Sequence[int],
        share: float,
    ) -> None:
        super().__init__(tables, optimizer, np.float32, seed)
        self.sizes, self.share = tuple(sizes), share
        self.arenas = [
            RecordArena(size + optimizer.state_width(size), np.float32, BLOCK_BYTES) for size in sizes
        ]
        self.arena = RecordArena(4, np.int32, BLOCK_BYTES)  # of entries

    @property
    def allocated_bytes(self) -> int:
        """Bytes of rows, entries and index."""
        records = sum(arena.allocated_bytes for arena in self.arenas)
        return records + self.arena.allocated_bytes + self.index.allocated_bytes

    @property
    def num_values(self) -> int:
        """Values held."""
        return sum(size * arena.num_records for size, arena in zip(self.sizes, self.arenas, strict=True))

    @property
    def most_values(self) -> int:
        """Values that may be held: the share, or the smallest size of every row if that is more."""
        num_rows = self.arena.num_records
        return max(int(self.share * self.sizes[-1] * num_rows), self.sizes[0] * num_rows)

    def locate(self, values: Int64s, starts: Int64s, feature_tables: Int64s, insert: bool) -> Read:
        """Find the rows of a batch; new ones start with the smallest size."""
        keys, key_starts, inverse = self.distinct(values, starts, feature_tables)
        entries, num_absent = self.index.find(keys, key_starts)
        if num_absent and insert:
            new = add_absent(self, keys, key_starts, entries, int(num_absent))
            tables = np.searchsorted(key_starts, new, side="right") - 1
            records = self.arenas[0].allocate(len(new))
            self.arenas[0].write(records, self._first_records(tables, keys[new]))
            fresh = np.zeros((len(new), 4), dtype=np.int32)
            fresh[:, RECORD] = records
            self.arena.write(entries[new], fresh)
        held = np.full((len(keys), 4), -1, dtype=np.int32)
        known = entries >= 0
        held[known] = self.arena.read(entries[known])
        return Read(keys, key_starts, inverse, entries, held)

    def learn(self, read: Read, norms: Floats) -> None:
        """Note that rows were read once more, with gradients of these norms; all must have an entry."""
        held = self.arena.read(read.entries)
        held[:, READS] += np.bincount(read.inverse, minlength=len(read.keys)).astype(np.int32)
        quality = held[:, QUALITY].copy().view(np.float32)
        held[:, QUALITY] = (np.float32(0.9) * quality + np.float32(0.1) * norms).view(np.int32)
        self.arena.write(read.entries, held)

    def grow(self, widen: Widen) -> int:
        """Give rows that deserve it the next size, the most popular and least trained first; how many."""
        grown = 0
        for level in reversed(range(len(self.sizes) - 1)):  # a row grows by one size at a time
            tables, entries, held = self._rows_at(level)
            reads, quality = held[:, READS], held[:, QUALITY].copy().view(np.float32)
            popular = np.flatnonzero(reads >= READS_PER_VALUE * self.sizes[level + 1])
            if not len(popular):
                continue
            popular = popular[quality[popular] >= np.quantile(quality[popular], UNTRAINED)]
            room = (self.most_values - self.num_values) // (self.sizes[level + 1] - self.sizes[level])
            order = np.argsort(-reads[popular] * quality[popular], kind="stable")
            chosen = np.sort(popular[order[: max(0, room)]])
            self._move(level, tables[chosen], entries[chosen], held[chosen], widen)
            grown += len(chosen)
        return grown

    def rows_by_size(self) -> list[int]:
        """How many rows have each size."""
        return [arena.num_records for arena in self.arenas]

    def _rows_at(self, level: int) -> tuple[Int64s, Int64s, npt.NDArray[np.int32]]:
        parts: list[tuple[Int64s, Int64s, npt.NDArray[np.int32]]] = []
        for table in range(len(self.tables)):
            for _, entries in self.index.blocks(table):
                held = self.arena.read(entries)
                some = held[:, LEVEL] == level
                parts.append((np.full(int(some.sum()), table), entries[some], held[some]))
        tables, entries, held = (np.concatenate(some) for some in zip(*parts, strict=True))
        return tables, entries, held

    def _move(
        self, level: int, tables: Int64s, entries: Int64s, held: npt.NDArray[np.int32], widen: Widen
    ) -> None:
        size, wider = self.sizes[level], self.sizes[level + 1]
        old = held[:, RECORD].astype(np.int64)
        before = self.arenas[level].read(old)
        after = np.full((len(old), self.arenas[level + 1].width), self.optimizer.initial_state, np.float32)
        for table in np.unique(tables):
            some = tables == table
            after[some, :wider] = widen(level, int(table), before[some, :size])
        if self.optimizer.state_width(8) == 1:  # one number says the same of a row of any size
            after[:, wider] = before[:, size]
        self.arenas[level].release(old)
        new = self.arenas[level + 1].allocate(len(old))
        self.arenas[level + 1].write(new, after)
        held = held.copy()
        held[:, LEVEL], held[:, RECORD], held[:, QUALITY] = level + 1, new, 0
        self.arena.write(entries, held)

    def _first_records(self, tables: Int64s, keys: Int64s) -> npt.NDArray[Any]:
        """Values drawn from (seed, table, key), as everywhere in Rowhaul, and first state."""
        columns = np.arange(1, self.sizes[0] + 1, dtype=np.uint64) * np.uint64(_STEP)
        seeds = mixed(keys.view(np.uint64) ^ self._seeds[tables])
        bits = mixed(seeds[:, None] + columns) >> np.uint64(40)
        records = np.full((len(keys), self.arenas[0].width), self.optimizer.initial_state, np.float32)
        records[:, : self.sizes[0]] = self._lows[tables, None] + self._steps[tables, None] * bits
        return records
