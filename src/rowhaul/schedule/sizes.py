"""Bytes of rows, prices of links and shares of batches: integers, so that all ranks agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError

PRICE_STEPS = 1000  # the price of the fastest link; ratios are exact to a thousandth
MAX_PRICE = 10**9  # sums of prices times bytes stay far from the end of 64-bit integers


@dataclass(frozen=True)
class RowSizes:
    """Bytes of a row of each table: its values, and the optimizer state that travels with them.

    A gradient that is sent takes as many bytes as the values do. In sums over all workers it takes those of
    ``summed``, by default as many.
    """

    values: tuple[int, ...]
    state: tuple[int, ...]
    summed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.values) != len(self.state):
            raise ConfigError(f"{len(self.values)} tables have values, {len(self.state)} a state")
        if not self.summed:
            object.__setattr__(self, "summed", self.values)
        if len(self.summed) != len(self.values):
            raise ConfigError(f"{len(self.values)} tables have values, {len(self.summed)} a size in sums")
        if any(size < 1 for size in self.values) or any(size < 0 for size in self.state):
            raise ConfigError(f"rows need at least one byte of values and no negative state; got {self}")

    @property
    def records(self) -> tuple[int, ...]:
        """Bytes of values and state together."""
        return tuple(v + s for v, s in zip(self.values, self.state, strict=True))

    @property
    def unit(self) -> int:
        """The largest number of bytes that divides all sizes: dispatchers count in it."""
        return math.gcd(*self.values, *self.state)


def link_prices(bytes_per_second: Sequence[float]) -> tuple[int, ...]:
    """Integer costs of a byte on links of these speeds, as small as their ratios allow.

    >>> link_prices([5e9 / 8] * 2 + [0.5e9 / 8])
    (1, 1, 10)
    """
    if len(bytes_per_second) == 0:
        raise ConfigError("no links were given; one speed per worker is needed")
    if not all(0 < speed < math.inf for speed in bytes_per_second):
        raise ConfigError(f"link speeds must be positive and finite; got {list(bytes_per_second)}")
    fastest = max(bytes_per_second)
    prices = [round(PRICE_STEPS * fastest / speed) for speed in bytes_per_second]
    shared = math.gcd(*prices)
    return tuple(price // shared for price in prices)


def check_prices(prices: Sequence[int], num_workers: int) -> None:
    """Refuse prices that are not positive integers, one per worker."""
    if len(prices) != num_workers:
        raise ConfigError(f"{len(prices)} link prices were given for {num_workers} workers")
    if any(not isinstance(price, int | np.integer) or not 1 <= price <= MAX_PRICE for price in prices):
        raise ConfigError(
            f"link prices must be positive whole numbers up to {MAX_PRICE:,} (see link_prices); "
            f"got {list(prices)}"
        )


def check_shares(shares: Sequence[int], num_workers: int) -> None:
    """Refuse shares that are not whole numbers, one per worker, at least one of them positive."""
    if len(shares) != num_workers:
        raise ConfigError(
            f"{len(shares)} shares were given for {num_workers} workers; give one weight for each, such as "
            f"{','.join(['2', *['1'] * (min(num_workers, 4) - 1)])}{',...' if num_workers > 4 else ''}"
        )
    if any(not isinstance(share, int | np.integer) or share < 0 for share in shares) or sum(shares) < 1:
        raise ConfigError(
            f"shares must be whole numbers, none negative, and at least one worker must have more than 0; "
            f"got {list(shares)}"
        )


def apportion(num_samples: int, shares: Sequence[int]) -> npt.NDArray[np.int64]:
    """Samples of each worker, in proportion to its share: the largest remainders round up, ties by rank.

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
