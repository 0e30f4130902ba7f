"""Random numbers as a function of a counter, so that any row can be made without the ones before it.

A *stream* is a 64-bit key made from the seed and a name; the value at a counter is a bijective mix of
both. The same (seed, name, counter) gives the same bits on every machine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

Counters = npt.NDArray[np.uint64]
Uniforms = npt.NDArray[np.float64]

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stream(seed: int, *names: str) -> np.uint64:
    """The key of the stream with this name, independent of every other stream."""
    return np.uint64(xxhash.xxh64_intdigest("/".join(names).encode(), seed & _MASK))


def bits(key: np.uint64, counters: npt.NDArray[np.integer]) -> Counters:
    """64 random bits for every counter (the finaliser of SplitMix64)."""
    mixed = counters.astype(np.uint64)
    mixed *= _GOLDEN
    mixed += key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def uniforms(key: np.uint64, counters: npt.NDArray[np.integer]) -> Uniforms:
    """A number in [0, 1) for every counter."""
    mixed = bits(key, counters)
    mixed >>= np.uint64(11)
    return mixed.astype(np.float64) * 2.0**-53
