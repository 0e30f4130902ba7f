"""The utilities of gradients that a worker has measured since the last pruning.

They decide nothing until rows are pruned, so they do not travel with rows: every worker adds up its own, and
reports once a period. Of a row that several workers train in one iteration each adds the norm of its own part
of the gradient, times the accesses of all: together that is at least what the norm of the sum would give, and
the same where one of them trains it alone.

Reports take few bits. Row numbers are sorted, and each is cut in two (Elias and Fano): low bits are written
as they are, high ones as steps from number to number, a bit each. That takes two bits a number and the
logarithm of how far they are apart. Utilities take two bytes each, which keeps them to half a percent: they
are only compared with each other.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.deciding.entries import decay_powers, decayed
from rowhaul.store.index import KeyIndex

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Arrays = dict[str, npt.NDArray[Any]]
Report = tuple[npt.NDArray[np.int32], Floats]  # rows, and utilities of their chunks

_HEADER = struct.Struct("<QQB")  # numbers, bits of the high parts, low bits of each


class UtilityLog:
    """Utilities of the rows that one worker has trained, by their numbers.

    Args:
        num_chunks: of a row.
        decay: of utilities, by step.
    """

    def __init__(self, num_chunks: int, decay: float) -> None:
        self._num_chunks, self._powers = num_chunks, decay_powers(decay)
        self.clear()

    def __len__(self) -> int:
        return int(self._index.num_keys[0])

    def add(self, numbers: npt.NDArray[Any], amounts: npt.NDArray[np.float64], now: int) -> None:
        """Add amounts to the utilities of rows, each once, in step ``now``."""
        places = self._find_or_add(numbers.astype(np.int64), now)
        kept = decayed(self._powers, now - self._touched[places])
        self._utilities[places] = kept[:, None] * self._utilities[places].astype(np.float64) + amounts
        self._touched[places] = now

    def report(self, now: int) -> tuple[npt.NDArray[np.int32], Floats]:
        """All rows, ascending, and their utilities as they are after step ``now``."""
        numbers, places = self._rows()
        kept = decayed(self._powers, now - self._touched[places])
        utilities = kept[:, None] * self._utilities[places].astype(np.float64)
        return numbers.astype(np.int32), utilities.astype(np.float32)

    def export(self) -> Arrays:
        """Everything, to continue from."""
        numbers, places = self._rows()
        utilities, touched = self._utilities[places], self._touched[places]
        return {"numbers": numbers, "utilities": utilities, "touched": touched}

    def restore(self, arrays: Arrays) -> None:
        """Continue where `export` was called."""
        self.clear()
        places = self._find_or_add(arrays["numbers"], 0)
        self._utilities[places], self._touched[places] = arrays["utilities"], arrays["touched"]

    def clear(self) -> None:
        """Begin anew: everything was reported."""
        self._index = KeyIndex(1)
        self._utilities: Floats = np.zeros((0, self._num_chunks), np.float32)
        self._touched: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    def _find_or_add(self, numbers: Ints, now: int) -> Ints:
        starts = np.array([0, len(numbers)])
        places, num_absent = self._index.find(numbers, starts)
        if int(num_absent):
            count = len(self)
            self._reserve(count + int(num_absent))
            new = np.arange(count, count + int(num_absent))
            self._index.insert(numbers, starts, places, num_absent, new)
            self._utilities[new], self._touched[new] = 0, now
        return places

    def _reserve(self, count: int) -> None:
        if count > (size := len(self._touched)):
            more = max(count, size * 3 // 2, 1024) - size
            self._utilities = np.pad(self._utilities, ((0, more), (0, 0)))
            self._touched = np.pad(self._touched, (0, more))

    def _rows(self) -> tuple[Ints, Ints]:
        numbers, places = map(np.concatenate, zip(*self._index.blocks(0), strict=True))
        order = np.argsort(numbers)
        return numbers[order], places[order]


def encode_set(numbers: Ints, bound: int) -> bytes:
    """Different numbers from 0 to ``bound`` - 1, ascending, as bytes."""
    count = len(numbers)
    low_bits = max(0, (bound // max(count, 1)).bit_length() - 1)
    high = numbers >> low_bits
    steps = np.zeros(int(high[-1]) + count if count else 0, np.uint8)
    steps[high + np.arange(count)] = 1
    places = np.arange(low_bits, dtype=np.int64)
    low = ((numbers[:, None] >> places) & 1).astype(np.uint8)
    header = _HEADER.pack(count, len(steps), low_bits)
    return header + np.packbits(steps).tobytes() + np.packbits(low.reshape(-1)).tobytes()


def decode_set(data: bytes) -> tuple[Ints, int]:
    """The numbers, and how many bytes they took of the beginning of the data."""
    count, num_steps, low_bits = _HEADER.unpack_from(data)
    middle = _HEADER.size + -(-num_steps // 8)
    end = middle + -(-count * low_bits // 8)
    steps = np.unpackbits(np.frombuffer(data[_HEADER.size : middle], np.uint8), count=num_steps)
    high = np.flatnonzero(steps) - np.arange(count)
    low = np.unpackbits(np.frombuffer(data[middle:end], np.uint8), count=count * low_bits)
    weights = np.int64(1) << np.arange(low_bits, dtype=np.int64)
    return (high << low_bits) + low.reshape(count, low_bits).astype(np.int64) @ weights, end


def encode_report(numbers: npt.NDArray[np.int32], utilities: npt.NDArray[np.float32]) -> bytes:
    """Rows, ascending, and how useful their chunks were, as bytes; nothing where there are none."""
    if not len(numbers):
        return b""
    bits = np.ascontiguousarray(utilities, np.float32).view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16  # to the nearest, in the middle to even
    return encode_set(numbers.astype(np.int64), int(numbers[-1]) + 1) + upper.astype("<u2").tobytes()


def decode_report(data: bytes, num_chunks: int) -> Report:
    """What `encode_report` was given, utilities with half their digits."""
    if not len(data):
        return np.empty(0, np.int32), np.empty((0, num_chunks), np.float32)
    numbers, end = decode_set(data)
    bits = np.frombuffer(data, "<u2", offset=end).astype(np.uint32) << 16
    return numbers.astype(np.int32), bits.view(np.float32).reshape(len(numbers), num_chunks)
