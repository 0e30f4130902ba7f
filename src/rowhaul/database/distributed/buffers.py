"""Memory for payloads, kept from step to step: fresh pages cost as much as filling them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]
_MOST_KEPT = 32
_SLACK = 8  # an eighth more than asked for, as the next step asks for a little more or less


class Buffers:
    """Lends arrays of vectors, whose contents are undefined."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._free: list[npt.NDArray[np.uint8]] = []  # whole blocks

    def take(self, count: int, dim: int) -> Floats:
        """An array, count x dim."""
        num_bytes = count * dim * self._dtype.itemsize
        fitting = [i for i, block in enumerate(self._free) if len(block) >= num_bytes]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda i: len(self._free[i])))
        else:
            block = np.empty(num_bytes + num_bytes // _SLACK, np.uint8)
        return block[:num_bytes].view(self._dtype).reshape(count, dim)

    def give_back(self, arrays: Iterable[Floats]) -> None:
        """Take back arrays that nobody uses any more."""
        self._free += [block for array in arrays if (block := array.base) is not None]
        if len(self._free) > _MOST_KEPT:
            self._free = sorted(self._free, key=len)[-_MOST_KEPT:]
