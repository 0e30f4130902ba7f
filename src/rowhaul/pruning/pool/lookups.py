"""What goes in and out of pruned tables: the rows of a batch, and rows as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.pool.entry_kernels import count_reads, keep_known
from rowhaul.store.distinct import Lookup
from rowhaul.store.index import Int64s

Chunks = npt.NDArray[np.int32]


class Version(NamedTuple):
    """How often entries left tables (or all were replaced), and how often some came."""

    num_left: int = 0
    num_came: int = 0


def decay_powers(decay: float) -> npt.NDArray[np.float64]:
    """Powers 0 to 1,023 of a decay, and those of 1,024 times as much, by multiplying: the same anywhere."""
    powers = np.ones((2, 1024))
    for level, factor in enumerate((decay, float(np.multiply.accumulate(np.full(1024, decay))[-1]))):
        powers[level, 1:] = np.multiply.accumulate(np.full(1023, factor))
    return powers


def reads_of_keys(inverse: npt.NDArray[np.int32], num_keys: int) -> Int64s:
    """How often a batch reads each of its distinct keys, given the key of each id."""
    counts = np.zeros(num_keys, dtype=np.int64)
    count_reads(inverse, counts)
    return counts


class Known(NamedTuple):
    """Those distinct keys of a batch that have an entry, table by table."""

    keys: Int64s
    starts: Int64s
    inverse: npt.NDArray[np.int32]  # each id's key; -1 without an entry
    entries: Int64s
    counts: Int64s  # how often the batch reads each


@dataclass
class Located:
    """The distinct keys of a batch and where their entries are, -1 for keys that have none (yet)."""

    keys: Int64s
    starts: Int64s
    inverse: npt.NDArray[np.int32]
    entries: Int64s
    version: Version  # of the tables before they were looked at

    def tables(self, which: Int64s) -> Int64s:
        """The table of some of the keys."""
        return np.searchsorted(self.starts, which, side="right") - 1

    @cached_property
    def counts(self) -> Int64s:
        """How often the batch reads each key."""
        return reads_of_keys(self.inverse, len(self.keys))

    def known(self) -> Known:
        """The keys that have an entry."""
        keys, entries = np.empty_like(self.keys), np.empty_like(self.entries)
        starts, inverse = np.empty_like(self.starts), np.empty_like(self.inverse)
        counts = np.zeros(len(keys) + 1, dtype=np.int64)
        count = keep_known(
            self.keys, self.starts, self.entries, self.inverse, keys, starts, entries, inverse, counts
        )
        return Known(keys[:count], starts, inverse, entries[:count], counts[1 : count + 1])


@dataclass(frozen=True)
class PrunedLookup(Lookup):
    """Where the rows of one batch are, of those that have an entry: ``locations`` are these.

    ``inverse`` is -1 for ids whose rows have none.
    """

    chunks: Chunks  # keys x chunks; -1: pruned
    held: npt.NDArray[np.int32]  # keys: how many of their chunks are there
    counts: Int64s  # keys: how often the batch reads each


@dataclass(frozen=True)
class RowBlock:
    """Some rows of a table, as they are stored."""

    keys: Int64s
    present: npt.NDArray[np.bool_]  # rows x chunks
    records: npt.NDArray[Any]  # chunks that are there, row by row: values, then state
    utilities: npt.NDArray[np.float32]  # rows x chunks, as of `touched`
    touched: npt.NDArray[np.int32]  # step of each row's utilities
