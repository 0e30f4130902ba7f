"""Reports of utilities in few bits: which rows, and how useful their chunks were.

Row numbers are a sorted list, of which every number is cut in two (Elias and Fano): the low bits are written
as they are, the high ones as steps from number to number, a bit each. That takes two bits a number and the
logarithm of how far they are apart. Utilities take two bytes each, which keeps them to half a percent: they
are only compared with each other.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Report = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]  # rows, and utilities of their chunks

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
