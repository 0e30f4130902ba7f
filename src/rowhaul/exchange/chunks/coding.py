"""Sets of numbers in few bits: what a pruning decided, told to other hosts.

Of a sorted list every number is cut in two (Elias and Fano): the low bits are written as they are, the high
ones as steps from number to number, a bit each. That takes two bits a number and the logarithm of how far
they are apart.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_HEADER = struct.Struct("<QQB")  # numbers, bits of the high parts, low bits of each


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
