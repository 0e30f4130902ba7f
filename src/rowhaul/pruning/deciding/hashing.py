"""Counter-based draws over arrays: the same numbers on every rank, whatever was drawn before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
_STEP = 0x9E3779B97F4A7C15


def mixed(values: UInt64s) -> UInt64s:
    """The bijective mixer of the store's kernels (splitmix64's finaliser), over an array."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def salt_of(seed: int, iteration: int) -> np.uint64:
    """A 64-bit number for a step of a run."""
    salt = mixed(np.array([(seed * _STEP + iteration) & (2**64 - 1)], dtype=np.uint64))
    return np.uint64(salt[0])


def draws_below(bound: int, count: int, seed: int, iteration: int) -> npt.NDArray[np.int64]:
    """``count`` numbers from 0 to ``bound`` - 1, with repetition."""
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
    drawn = mixed(counters ^ salt_of(seed, iteration))
    # 53 bits are exact in a double, so every machine rounds the product alike.
    share = (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.minimum((share * bound).astype(np.int64), bound - 1)
