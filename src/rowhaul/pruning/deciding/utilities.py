"""How useful a row has been: a decayed count of its accesses, in whole numbers.

A count is a fixed-point number of 32 bits. An access adds `ONE_ACCESS`; before that the count decays for the
steps since the row was last read, by a whole-number product that drops the fraction. So it is a function of
when, and how often, the row was read: the same bits in one process and on every rank of a cluster.

The utilities of gradients (FIITED's) are sums of floating-point norms, one for each chunk, and decay alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

ONE_ACCESS = 1 << 12
MOST = 2**32 - 1  # counts stop here, at a million accesses


def decay_powers(decay: float) -> npt.NDArray[np.float64]:
    """Powers 0 to 1,023 of a decay, and those of 1,024 times as much, by multiplying: the same anywhere."""
    powers = np.ones((2, 1024))
    for level, factor in enumerate((decay, float(np.multiply.accumulate(np.full(1024, decay))[-1]))):
        powers[level, 1:] = np.multiply.accumulate(np.full(1023, factor))
    return powers


def count_powers(decay: float) -> npt.NDArray[np.uint64]:
    """The same as fixed-point numbers with 32 bits behind the point."""
    return np.floor(decay_powers(decay) * 2.0**32).astype(np.uint64)


def decayed(powers: npt.NDArray[np.float64], steps: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """``decay**steps``, the same bits anywhere."""
    taken: npt.NDArray[np.float64] = powers[0, steps & 1023] * powers[1, np.minimum(steps >> 10, 1023)]
    return taken


def decayed_counts(
    powers: npt.NDArray[np.uint64], counts: npt.NDArray[Any], steps: npt.NDArray[Any]
) -> npt.NDArray[np.uint32]:
    """Decay counts for some steps without an access; ``powers`` are those of `count_powers`."""
    shift = np.uint64(32)
    steps = np.maximum(steps, 0)
    low = (counts.astype(np.uint64) * powers[0, steps & 1023]) >> shift
    both: npt.NDArray[np.uint64] = (low * powers[1, np.minimum(steps >> 10, 1023)]) >> shift
    return both.astype(np.uint32)


def counts_of_sums(sums: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Counts for rows with floating-point utilities (rows x chunks): in proportion, one access on average.

    Checkpoints of versions that had no counts are read this way.
    """
    best = sums.max(axis=1, initial=0).astype(np.float64)
    mean = best.mean() if len(best) else 0.0
    if not mean > 0:
        return np.zeros((len(best), 1), np.uint32)
    counts: npt.NDArray[np.float64] = np.minimum(np.round(best / mean * ONE_ACCESS), MOST)
    return counts.astype(np.uint32)[:, None]
