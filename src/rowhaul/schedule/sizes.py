"""How many bytes a row has, and what a byte costs on each link: integers, so that all ranks agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rowhaul.errors import ConfigError

PRICE_STEPS = 1000  # the fastest link is priced in so many steps; ratios are exact to a thousandth


@dataclass(frozen=True)
class RowSizes:
    """Bytes of a row of each table: its values, and the optimizer state that travels with them."""

    values: tuple[int, ...]
    state: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.state):
            raise ConfigError(f"{len(self.values)} tables have values, {len(self.state)} a state")
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
