"""What goes in and out of pruned tables: the rows of a batch, and rows as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.store.index import Int64s
from rowhaul.store.pruning.kernels import count_reads
from rowhaul.store.tables import Lookup

Chunks = npt.NDArray[np.int32]


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


@dataclass
class Located:
    """The distinct keys of a batch and where their entries are, -1 for keys that have none (yet)."""

    keys: Int64s
    starts: Int64s
    inverse: npt.NDArray[np.int32]
    entries: Int64s

    def tables(self, which: Int64s) -> Int64s:
        """The table of some of the keys."""
        return np.searchsorted(self.starts, which, side="right") - 1

    def counts(self) -> Int64s:
        """How often the batch reads each key."""
        return reads_of_keys(self.inverse, len(self.keys))


@dataclass(frozen=True)
class PrunedLookup(Lookup):
    """Where the rows of one batch are: ``locations`` are their entries, -1 of those that have none."""

    chunks: Chunks  # distinct keys x chunks; -1: pruned
    held: npt.NDArray[np.int32]  # distinct keys: how many of their chunks are there


@dataclass(frozen=True)
class RowBlock:
    """Some rows of a table, as they are stored."""

    keys: Int64s
    present: npt.NDArray[np.bool_]  # rows x chunks
    records: npt.NDArray[Any]  # chunks that are there, row by row: values, then state
    utilities: npt.NDArray[np.float32]  # rows x chunks, as of `touched`
    touched: npt.NDArray[np.int32]  # step of each row's utilities
