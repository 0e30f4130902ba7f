"""How many different rows were ever seen, in 16 KiB: rows that were forgotten must still count.

A target of 90 % means a tenth of the model that there would be without pruning. Keys that left the index
cannot be told from new ones when they return, so they are counted by their hashes (HyperLogLog), to about
a percent. Counters of several ranks join by the larger of each register.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.deciding.entry_kernels import count_absent

_BITS = 14


class DistinctCounter:
    """Counts different rows by a 64-bit hash of (seed of the table, key)."""

    def __init__(self) -> None:
        self.registers: npt.NDArray[np.uint8] = np.zeros(1 << _BITS, dtype=np.uint8)

    def add_absent(
        self,
        keys: npt.NDArray[np.int64],
        entries: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        seeds: npt.NDArray[np.uint64],
    ) -> int:
        """Note those keys that have no entry (-1), seen before or not; returns how many they are."""
        return int(count_absent(keys, entries, starts, seeds, _BITS, self.registers))

    def estimate(self) -> int:
        """About how many there were."""
        size = len(self.registers)
        by_rank = np.bincount(self.registers)
        raw = 0.7213 / (1 + 1.079 / size) * size**2 / float(by_rank @ np.ldexp(1.0, -np.arange(len(by_rank))))
        num_empty = int(by_rank[0])
        if raw <= 2.5 * size and num_empty:
            return round(size * math.log(size / num_empty))
        return round(raw)
