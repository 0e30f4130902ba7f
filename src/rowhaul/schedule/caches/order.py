"""The seam between the caches and the order in which they evict copies; and the lists that orders keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.arrays import Arrays, Saved
from rowhaul.schedule.caches.copies import CopyPool

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]

_SMALLEST = 16  # entries; capacities are powers of two, so that rings can wrap with a mask

# What a worker needs in one step, added up by `look_up`; room is in the unit of the capacities.
DEMAND = np.dtype(
    [
        ("num_rows", np.int64),  # rows it trains
        ("smallest", np.int64),  # the room that the smallest of these takes
        ("num_missing", np.int64),  # those of which it has no copy
        ("missing_room", np.int64),
    ]
)


class Step(NamedTuple):
    """One iteration, as an order sees it."""

    iteration: int
    slots: Int32s  # rows
    trainers: Uint64s  # rows
    current: Uint64s  # rows
    size: Int64s  # slots
    next_use: Int32s  # slots
    pair_rows: Int32s  # (row, worker) pairs, by row, then worker: position in `slots`
    pair_workers: npt.NDArray[np.int8]
    pair_copies: Int32s  # -1 where the worker has none yet
    demand: npt.NDArray[np.void]  # workers, of DEMAND
    pair_edges: Int64s  # chunks + 1: where the pairs of each begin
    rows_before: Int64s  # chunks x workers: rows that each worker trains of earlier chunks


class Order(Protocol):
    """Knows which copy each worker evicts next. The three calls of a step come in this order."""

    def reserve(self, step: Step, pool: CopyPool) -> None:
        """Make room for all that the step can bring."""

    def evict(self, step: Step, pool: CopyPool, used: Int64s, capacities: Int64s) -> int:
        """Choose victims among the copies that the batch does not use; those it uses are marked already.

        What the victims leave is subtracted from ``used``, until the batch's missing rows fit on each
        worker. Victims go on the pool's stack, by worker, in order; returns their number.
        """

    def append(self, step: Step, pool: CopyPool) -> None:
        """Add the batch's copies, old and new; every pair has one now."""

    def forget(self, copies: Int32s, pool: CopyPool) -> None:
        """Forget copies that are given up between steps; the pool still has them."""

    def export(self, copies: Int32s) -> Arrays:
        """Export what the order knows beyond the pool, of these copies (all of them) and of workers."""

    def restore(self, saved: Saved, copies: Int32s, rows: Int32s, room: Int64s, pool: CopyPool) -> None:
        """Restore the order of all copies of the pool, as exported; there were none before.

        ``rows`` is the place of each one's row in (table, key) order, ``room`` what it takes in a cache.
        """

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory taken, beside the pool's."""


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
        num_needed: returns the places that each list needs, those of its entries included.
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
