"""How shared rows are divided among tables, and which of its table's an id reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def divided(count: int, weights: Sequence[int]) -> Int64s:
    """Divide ``count`` rows by weight, at least one each and no more than there are."""
    total, spare = max(sum(weights), 1), count - len(weights)
    return np.array([1 + spare * one // total for one in weights], np.int64)


def masks(sizes: Int64s) -> Int64s:
    """Return one less than the least power of two that is not below each size."""
    return np.array([(1 << (size - 1).bit_length()) - 1 for size in sizes.tolist()], np.int64)


def shared_rows(bits: Int64s, sizes: Int64s) -> Int64s:
    """Return which of ``sizes`` shared rows bits of a hash name, as `slot_kernels.find_rows` does.

    As in linear hashing: when there is one more, ids move to it from one other, and no more move.
    """
    each = masks(sizes)
    rows = bits & each
    return np.where(rows < sizes, rows, bits & (each >> 1))
