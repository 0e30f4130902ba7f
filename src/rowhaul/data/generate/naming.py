"""What the ids of a column look like: the key in Parquet and the token in the raw text.

Reading the raw text must give the keys of the Parquet columns, so both are made here from a rank: hexadecimal
and integer tokens are their own value, other strings are hashed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rowhaul.data.generate.counters import bits, stream
from rowhaul.data.keys import hash_string, hash_strings

Ranks = npt.NDArray[np.int64]
Keys = npt.NDArray[np.int64]


def _digit_table(digits: bytes) -> npt.NDArray[np.uint32]:
    """Four ASCII digits, packed into 32 bits, for every 16-bit number."""
    nibbles = np.arange(1 << 16)[:, None] >> np.array([12, 8, 4, 0]) & 15
    packed: npt.NDArray[np.uint32] = np.frombuffer(digits, np.uint8)[nibbles].view(np.uint32)
    return packed[:, 0]


_LOWER_CASE = _digit_table(b"0123456789abcdef")
_UPPER_CASE = _digit_table(b"0123456789ABCDEF")


class Naming(ABC):
    """Turns ranks into keys and tokens."""

    type: ClassVar[str] = "integer"  # of an id column in a schema

    @abstractmethod
    def keys(self, ranks: Ranks) -> Keys:
        """The key of every rank."""

    def tokens(self, ranks: Ranks) -> pa.Array:
        """The text of every rank; unless a class says otherwise, its key as a decimal number."""
        return pa.array(self.keys(ranks)).cast(pa.string())


@dataclass(frozen=True)
class HexTokens(Naming):
    """Eight hexadecimal digits, as in Criteo and Avazu: a bijection of 32 bits that hides the rank."""

    type: ClassVar[str] = "hex"
    column: str

    def keys(self, ranks: Ranks) -> Keys:
        """The value of the eight digits."""
        mixed = ranks.astype(np.uint32)
        mixed ^= np.uint32(int(stream(0, self.column)) & 0xFFFFFFFF)
        mixed *= np.uint32(0x9E3779B1)
        mixed ^= mixed >> np.uint32(16)
        mixed *= np.uint32(0x85EBCA6B)
        mixed ^= mixed >> np.uint32(13)
        return mixed.astype(np.int64)

    def tokens(self, ranks: Ranks) -> pa.Array:
        """Lower-case digits, leading zeros kept."""
        keys = self.keys(ranks)
        return _fixed_width(_LOWER_CASE[np.stack((keys >> 16, keys & 0xFFFF), axis=1)])


@dataclass(frozen=True)
class Integers(Naming):
    """``count`` integers from ``first`` on; ``scattered`` so that their size does not reveal popularity."""

    count: int
    first: int = 0
    scattered: bool = True

    def keys(self, ranks: Ranks) -> Keys:
        """``first`` plus the rank, or plus a permutation of the ranks."""
        if not self.scattered:
            return ranks + self.first
        return (ranks * self._multiplier() + self.count // 3) % self.count + self.first

    def _multiplier(self) -> int:
        multiplier = int(self.count * 0.618) | 1
        while np.gcd(multiplier, self.count) != 1:
            multiplier += 1
        return multiplier


@dataclass(frozen=True)
class Listed(Naming):
    """A few given integers, the most popular first."""

    values: tuple[int, ...]

    def keys(self, ranks: Ranks) -> Keys:
        """The integers themselves."""
        return np.array(self.values, np.int64)[ranks]


@dataclass(frozen=True)
class Digests(Naming):
    """32 upper-case hexadecimal digits, as in Criteo Sponsored Search."""

    type: ClassVar[str] = "string"
    column: str

    def keys(self, ranks: Ranks) -> Keys:
        """The hashes of the tokens."""
        return hash_strings(self.tokens(ranks))

    def tokens(self, ranks: Ranks) -> pa.Array:
        """Random digits for every rank."""
        key = stream(0, self.column)
        words = np.stack((bits(key, ranks), bits(~key, ranks)), axis=1).view(np.uint16)  # ranks x 8
        return _fixed_width(_UPPER_CASE[words])


@dataclass(frozen=True)
class Words(Naming):
    """A small vocabulary, the most popular first."""

    type: ClassVar[str] = "string"
    words: tuple[str, ...]

    def keys(self, ranks: Ranks) -> Keys:
        """The hashes of the words."""
        return np.array([hash_string(word) for word in self.words], np.int64)[ranks]

    def tokens(self, ranks: Ranks) -> pa.Array:
        """The words."""
        return pa.array(self.words).take(pa.array(ranks))


def _fixed_width(packed: npt.NDArray[np.uint32]) -> pa.Array:
    """Rows of packed ASCII characters as an Arrow string array."""
    rows, width = packed.shape[0], 4 * packed.shape[1]
    offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int32)
    return pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(packed))
