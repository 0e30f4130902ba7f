"""Hashes of rows, draws by counter, and how many rows there were: the same numbers on every rank."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.deciding.entry_kernels import count_absent

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
_STEP = 0x9E3779B97F4A7C15
_BITS = 14


def mixed(values: UInt64s) -> UInt64s:
    """The bijective mixer of the store's kernels (splitmix64's finaliser), over an array."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def salt_of(seed: int, iteration: int) -> np.uint64:
    """A 64-bit number for a step of a run."""
    salt = mixed(np.array([(seed * _STEP + iteration) & (2**64 - 1)], dtype=np.uint64))
    return np.uint64(salt[0])


def draws_below(bound: int, count: int, seed: int, iteration: int) -> Int64s:
    """``count`` numbers from 0 to ``bound`` - 1, with repetition."""
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
    drawn = mixed(counters ^ salt_of(seed, iteration))
    # 53 bits are exact in a double, so every machine rounds the product alike.
    share = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.minimum((share * bound).astype(np.int64), bound - 1)


class DistinctCounter:
    """Counts the different rows ever seen, in 16 KiB, by a 64-bit hash of (seed of the table, key).

    A target of 90 % means a tenth of the model that there would be without pruning. Keys that left the index
    cannot be told from new ones when they return, so they are counted by their hashes (HyperLogLog), to about
    a percent. Counters of several ranks join by the larger of each register.
    """

    def __init__(self) -> None:
        self.registers: npt.NDArray[np.uint8] = np.zeros(1 << _BITS, dtype=np.uint8)

    def add_absent(self, keys: Int64s, entries: Int64s, starts: Int64s, seeds: UInt64s) -> int:
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
