"""Dividing a batch by shares: whole samples that add up, on every rank the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError


def apportion(num_samples: int, shares: Sequence[int]) -> npt.NDArray[np.int64]:
    """How many samples each worker trains: the largest remainders round up, ties by rank.

    >>> apportion(10, [1, 1, 1, 1]).tolist()
    [3, 3, 2, 2]
    """
    total = sum(shares)
    if total < 1 or min(shares) < 0:
        raise ConfigError(f"shares must be whole numbers, none negative and one positive; got {list(shares)}")
    samples = [num_samples * share // total for share in shares]
    remainders = [num_samples * share % total for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda j: (-remainders[j], j))
    for j in by_remainder[: num_samples - sum(samples)]:
        samples[j] += 1
    return np.array(samples, np.int64)
