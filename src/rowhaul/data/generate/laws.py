"""How skewed the values of a field are: a truncated Zipf-Mandelbrot law with a closed-form inverse.

The closed form lets a sampler turn one uniform number into a rank with one power, whatever the number
of ids, and tells how many ids a log of any size will hold (`benchmarks/expectation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError

LARGEST_SUPPORT = 1 << 32  # an id is at most 32 bits, as in the 8-digit tokens of Criteo and Avazu


@dataclass(frozen=True)
class SkewLaw:
    """Rank r = 0, 1, … has a probability close to proportional to (r + offset)^-exponent.

    Args:
        support: How many ranks there are.
        exponent: Skew of the tail; above 1 the number of distinct ids keeps growing slowly for ever.
        offset: Flattens the head: the first ``offset`` ranks are about equally likely.
        head: A share of all draws that go to rank 0 beforehand, for fields with one default value.
    """

    support: int
    exponent: float
    offset: float = 1.0
    head: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.support <= LARGEST_SUPPORT:
            raise ConfigError(f"support must be from 1 to 2^32, got {self.support}")
        if self.exponent <= 0 or self.exponent == 1:
            raise ConfigError(f"exponent must be positive and other than 1, got {self.exponent}")
        if self.offset <= 0 or not 0 <= self.head < 1:
            raise ConfigError(f"offset > 0 and 0 <= head < 1 are needed, got {self.offset} and {self.head}")

    def ranks(self, uniforms: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The ranks at these quantiles."""
        if self.head:
            uniforms = np.maximum(uniforms - self.head, 0.0) / (1.0 - self.head)
        first, last = self._powers()
        at = (first - uniforms * (first - last)) ** (1.0 / (1.0 - self.exponent)) - self.offset
        ranks = at.astype(np.int64)
        return np.clip(ranks, 0, self.support - 1, out=ranks)

    def cumulative(self, rank: npt.NDArray[np.floating] | npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        """The probability of a rank below ``rank``, which may be fractional."""
        first, last = self._powers()
        tail = (first - (rank + self.offset) ** (1.0 - self.exponent)) / (first - last)
        return np.where(rank > 0, self.head + (1.0 - self.head) * tail, 0.0)

    def _powers(self) -> tuple[float, float]:
        power = 1.0 - self.exponent
        return self.offset**power, (self.support + self.offset) ** power
