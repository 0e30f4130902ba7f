"""Hashes of arrays by which ranks find out, before they act, that they disagree.

They guard against mistakes, not against malice, and are computed in every iteration: hence xxHash.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

DIGEST_BYTES = 16


def digest(text: str, arrays: Iterable[npt.NDArray[Any]]) -> bytes:
    """Bytes that depend on the text and on the type, the shape and the content of every array."""
    arrays = [np.ascontiguousarray(array) for array in arrays]
    shapes = ";".join(f"{array.dtype.str}{array.shape}" for array in arrays)
    state = xxhash.xxh3_128(f"{len(text)}:{text}{shapes}".encode())
    for array in arrays:
        state.update(array.data)
    return state.digest()
