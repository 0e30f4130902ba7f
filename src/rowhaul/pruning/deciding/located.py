"""The distinct rows of a batch, and where their entries are in the map."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.deciding.entry_kernels import count_reads, keep_known

Int64s = npt.NDArray[np.int64]


class Version(NamedTuple):
    """How often entries left a map (or all were replaced), and how often some came."""

    num_left: int = 0
    num_came: int = 0


class Known(NamedTuple):
    """Those distinct keys of a batch that have an entry, table by table."""

    keys: Int64s
    starts: Int64s
    inverse: npt.NDArray[np.int32]  # each id's key; -1 without an entry
    entries: Int64s
    counts: Int64s  # how often the batch reads each


@dataclass
class Located:
    """The distinct keys of a batch, table by table, and their entries, -1 for keys that have none (yet)."""

    keys: Int64s
    starts: Int64s  # tables + 1
    inverse: npt.NDArray[np.int32]  # each id's key
    entries: Int64s
    version: Version  # of the map before it was looked at

    def tables(self, which: Int64s) -> Int64s:
        """The table of some of the keys."""
        return np.searchsorted(self.starts, which, side="right") - 1

    @cached_property
    def counts(self) -> Int64s:
        """How often the batch reads each key."""
        counts = np.zeros(len(self.keys), dtype=np.int64)
        count_reads(self.inverse, counts)
        return counts

    def known(self) -> Known:
        """The keys that have an entry."""
        keys, entries = np.empty_like(self.keys), np.empty_like(self.entries)
        starts, inverse = np.empty_like(self.starts), np.empty_like(self.inverse)
        counts = np.zeros(len(keys) + 1, dtype=np.int64)
        count = keep_known(
            self.keys, self.starts, self.entries, self.inverse, keys, starts, entries, inverse, counts
        )
        return Known(keys[:count], starts, inverse, entries[:count], counts[1 : count + 1])
