"""String ids as 64-bit keys: XXH64 of their UTF-8 bytes, viewed as int64.

The hash is stable over machines and versions, so a key always means the same string and nothing has
to be indexed beforehand. Two different strings may get the same key: among n distinct strings of one table
the probability of any collision is about n²/2^65 (100 million strings: 0.027 %).
`rowhaul.data.collisions` checks a data set for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from rowhaul._kernels import kernel
from rowhaul._memory import load8, load32, load64

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)


def hash_string(text: str) -> int:
    """The key of one string; one from the command line that is not UTF-8 stands for its bytes."""
    unsigned = xxhash.xxh64_intdigest(text.encode(errors="surrogateescape"))
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def hash_texts(texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """The keys of Python strings."""
    return hash_strings(pa.array(texts, pa.large_string()))


def hash_strings(array: pa.Array | pa.ChunkedArray, seed: int = 0) -> npt.NDArray[np.int64]:
    """The keys of an Arrow array of strings or bytes, plain, chunked or dictionary-encoded.

    A null gets 0. A ``seed`` other than 0 gives an independent hash, for the check for collisions.
    """
    if isinstance(array, pa.ChunkedArray):
        parts = [hash_strings(chunk, seed) for chunk in array.chunks]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
    array = plain_text(array)
    kind = array.type
    if pa.types.is_dictionary(kind):
        keys = np.append(hash_strings(array.dictionary, seed), np.int64(0))
        indices = array.indices.fill_null(len(keys) - 1) if array.indices.null_count else array.indices
        return np.asarray(keys[indices.to_numpy(zero_copy_only=False)])
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        offset_type: type[Any] = np.int32
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        offset_type = np.int64
    else:
        raise TypeError(f"strings or bytes are needed to make keys, got an array of {kind}")
    if len(array) == 0:
        return np.empty(0, np.int64)
    _, offset_buffer, byte_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, offset_type)[array.offset : array.offset + len(array) + 1]
    keys = np.empty(len(array), np.int64)
    _hash_spans(np.uint64(byte_buffer.address if byte_buffer else 0), offsets, np.uint64(seed), keys)
    if array.null_count:
        keys[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return keys


def is_view(kind: pa.DataType) -> bool:
    """Whether a type is strings or bytes as views, which Polars and Arrow for Rust write."""
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without views: what they show, one after the other."""
    if not is_view(kind):
        return kind
    return pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary()


def plain_text(array: pa.Array) -> pa.Array:
    """Strings or bytes with offsets in place of views, which Arrow casts but hardly computes with."""
    kind = array.type
    if pa.types.is_dictionary(kind) and is_view(kind.value_type):
        return pa.DictionaryArray.from_arrays(array.indices, plain_text(array.dictionary))
    return array.cast(plain_type(kind)) if is_view(kind) else array


@kernel
def _hash_spans(text, offsets, seed, keys):
    for i in range(len(keys)):
        keys[i] = xxh64(text + np.uint64(offsets[i]), text + np.uint64(offsets[i + 1]), seed)


@kernel
def xxh64(start, end, seed):
    """XXH64 of the bytes from address ``start`` to ``end``, as int64; all arguments are uint64."""
    at = start
    size = end - start
    if size >= np.uint64(32):
        a = seed + _P1 + _P2
        b = seed + _P2
        c = seed
        d = seed - _P1
        while at + np.uint64(32) <= end:
            a = _round(a, load64(at))
            b = _round(b, load64(at + np.uint64(8)))
            c = _round(c, load64(at + np.uint64(16)))
            d = _round(d, load64(at + np.uint64(24)))
            at += np.uint64(32)
        h = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        for lane in (a, b, c, d):
            h = (h ^ _round(np.uint64(0), lane)) * _P1 + _P4
    else:
        h = seed + _P5
    h += size
    while at + np.uint64(8) <= end:
        h = _rotate(h ^ _round(np.uint64(0), load64(at)), 27) * _P1 + _P4
        at += np.uint64(8)
    if at + np.uint64(4) <= end:
        h = _rotate(h ^ (np.uint64(load32(at)) * _P1), 23) * _P2 + _P3
        at += np.uint64(4)
    while at < end:
        h = _rotate(h ^ (np.uint64(load8(at)) * _P5), 11) * _P1
        at += np.uint64(1)
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    return np.int64(h ^ (h >> np.uint64(32)))


@kernel
def _rotate(value, bits):
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@kernel
def _round(lane, word):
    return _rotate(lane + word * _P2, 31) * _P1
