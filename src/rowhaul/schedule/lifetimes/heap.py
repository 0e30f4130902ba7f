"""The rows of one table by how often they were named: which to forget first under an ``lfu`` limit.

A row is pushed when it is admitted. Its priority only rises, and is corrected when the row comes to the top;
a node whose row has expired in the meantime, even if admitted again, is dropped then.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul.schedule.arrays import extended
from rowhaul.schedule.heap import heapify, pop, sift_down, sift_up

_SMALLEST = 64

NODE = np.dtype(
    [
        ("stamp", np.int64),  # the row's key
        ("major", np.int32),  # samples that had named the row,
        ("minor", np.int32),  # and its last use, when the node was put where it is
        ("item", np.int32),  # the row's entry
        ("ticket", np.int32),  # when the row was admitted: identifies it, with the key
    ]
)


class FrequencyHeap:
    """Known rows, the least frequent on top; ties by last use, then key."""

    def __init__(self) -> None:
        self._nodes: npt.NDArray[np.void] = np.zeros(0, NODE)
        self._size = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes that the heap takes."""
        return self._nodes.nbytes

    def push(self, entries: npt.NDArray[np.void], numbers: npt.NDArray[np.int32], num_known: int) -> None:
        """Add rows that were just admitted; the table has ``num_known`` in all."""
        if self._size + len(numbers) > max(2 * num_known, _SMALLEST):
            self.drop_gone(entries)
        if self._size + len(numbers) > len(self._nodes):
            self._nodes = extended(
                self._nodes, max(_SMALLEST, 2 * len(self._nodes), self._size + len(numbers))
            )
        self._size = push_all(entries, numbers, self._nodes, self._size)

    def drop_gone(self, entries: npt.NDArray[np.void]) -> None:
        """Drop the nodes of rows that are gone."""
        self._size = keep_valid(entries, self._nodes, self._size)

    def pop(self, entries: npt.NDArray[np.void], count: int) -> npt.NDArray[np.int32]:
        """Remove and return the ``count`` least frequent rows; the heap must have as many."""
        numbers: npt.NDArray[np.int32]
        numbers, self._size = pop_smallest(entries, self._nodes, self._size, count)
        return numbers


@register_jitable
def _is_valid(entries, node):
    entry = entries[node.item]
    return entry.born == node.ticket and entry.key == node.stamp


@kernel
def push_all(entries, numbers, nodes, size):
    """Push entries onto a heap that has room for them; returns its new size."""
    for number in numbers:
        entry = entries[number]
        sift_up(nodes, 0, size, entry.count, entry.last, entry.key, number, entry.born)
        size += 1
    return size


@kernel
def pop_smallest(entries, nodes, size, count):
    """Pop the ``count`` least frequent rows off a heap; returns their entries, and its new size."""
    numbers = np.empty(count, np.int32)
    taken = 0
    while taken < count:
        top = nodes[0]
        if _is_valid(entries, top):
            entry = entries[top.item]
            if entry.count != top.major or entry.last != top.minor:
                sift_down(nodes, 0, size, 0, entry.count, entry.last, entry.key, top.item, entry.born)
                continue
            numbers[taken] = top.item
            taken += 1
        pop(nodes, 0, size)
        size -= 1
    return numbers, size


@kernel
def keep_valid(entries, nodes, size):
    """Drop the nodes of rows that are gone; returns the new size."""
    kept = 0
    for i in range(size):
        if _is_valid(entries, nodes[i]):
            nodes[kept] = nodes[i]
            kept += 1
    heapify(nodes, 0, kept)
    return kept
