"""Several growable lists in one array, which a compiled loop can take as it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

_SMALLEST = 16  # entries; capacities are powers of two, so that rings can wrap with a mask


class Segments:
    """Lists of records side by side: list i has ``capacity[i]`` places from ``entries[start[i]]`` on."""

    def __init__(self, dtype: np.dtype[np.void], wanted: Int64s) -> None:
        self.capacity = np.full(len(wanted), _SMALLEST, np.int64)
        while (small := self.capacity < wanted).any():
            self.capacity[small] *= 2
        self.start = np.cumsum(self.capacity) - self.capacity
        self.entries = np.zeros(self.capacity.sum(), dtype)


def with_room(
    lists: Segments, num_needed: Callable[[], Int64s], compact: Callable[[int, Segments], None]
) -> Segments:
    """The lists, or larger ones, with the places that they need.

    Args:
        lists: what there is.
        num_needed: tells how many places each list needs, those of its entries included.
        compact: copies the entries of a list that still count, into the same lists or into others.
            A list that needs more than half of its places afterwards is enlarged, so that the next time
            is far away.
    """
    full = np.flatnonzero(num_needed() > lists.capacity).tolist()
    if not full:
        return lists
    for i in full:
        compact(i, lists)
    wanted = lists.capacity.copy()
    wanted[full] = np.maximum(wanted[full], 2 * num_needed()[full])
    if (wanted == lists.capacity).all():
        return lists
    larger = Segments(lists.entries.dtype, wanted)
    for i in range(len(wanted)):
        compact(i, larger)
    return larger
