"""Arrays that grow: longer ones with the old content, and stacks of what is free in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def extended(array: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """The array with zeros after it."""
    longer = np.zeros(length, array.dtype)
    longer[: len(array)] = array
    return longer


def extended_stack(free: npt.NDArray[np.int32], num_free: int, length: int) -> npt.NDArray[np.int32]:
    """A stack of free places with the new ones up to ``length`` on top, the lowest of them first to go.

    It has room for all places, so its length is their number so far.
    """
    longer = extended(free, length)
    longer[num_free : num_free + length - len(free)] = np.arange(length - 1, len(free) - 1, -1)
    return longer
