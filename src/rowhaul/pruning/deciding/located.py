"""The distinct rows of a batch, and where their entries are in the map."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.deciding.entry_kernels import keep_known

Int64s = npt.NDArray[np.int64]


@dataclass
class Located:
    """The distinct keys of a batch, table by table, and their entries, -1 for keys that have none (yet)."""

    keys: Int64s
    starts: Int64s  # tables + 1
    inverse: npt.NDArray[np.int32]  # each id's key
    entries: Int64s
    version: tuple[int, int]  # how often entries had left the map, and come, before the lookup

    def tables(self, which: Int64s) -> Int64s:
        """The table of some of the keys."""
        return np.searchsorted(self.starts, which, side="right") - 1

    @cached_property
    def counts(self) -> Int64s:
        """How often the batch reads each key."""
        return np.bincount(self.inverse, minlength=len(self.keys))

    def known(self) -> tuple[Int64s, Int64s, npt.NDArray[np.int32], Int64s, Int64s]:
        """Keep what has an entry: keys, starts, each id's key (-1: none), entries, and reads of each key."""
        keys, entries = np.empty_like(self.keys), np.empty_like(self.entries)
        starts, inverse = np.empty_like(self.starts), np.empty_like(self.inverse)
        counts = np.zeros(len(keys) + 1, dtype=np.int64)
        count = keep_known(
            self.keys, self.starts, self.entries, self.inverse, keys, starts, entries, inverse, counts
        )
        return keys[:count], starts, inverse, entries[:count], counts[1 : count + 1]
