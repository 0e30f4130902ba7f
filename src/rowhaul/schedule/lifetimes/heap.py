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

_CHILDREN = 4  # of a node: a flat heap waits for memory less often than a binary one
_SMALLEST = 64

NODE = np.dtype(
    [
        ("key", np.int64),
        ("count", np.int32),  # samples that had named the row,
        ("last", np.int32),  # and its last use, when the node was put where it is
        ("entry", np.int32),
        ("born", np.int32),  # when the row was admitted: identifies it, with the key
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
            self._size = keep_valid(entries, self._nodes, self._size)
        if self._size + len(numbers) > len(self._nodes):
            self._nodes = extended(
                self._nodes, max(_SMALLEST, 2 * len(self._nodes), self._size + len(numbers))
            )
        self._size = push_all(entries, numbers, self._nodes, self._size)

    def pop(self, entries: npt.NDArray[np.void], count: int) -> npt.NDArray[np.int32]:
        """Remove and return the ``count`` least frequent rows; the heap must have as many."""
        numbers: npt.NDArray[np.int32]
        numbers, self._size = pop_smallest(entries, self._nodes, self._size, count)
        return numbers


@register_jitable
def _less(count, last, key, node):
    if count != node.count:
        return count < node.count
    if last != node.last:
        return last < node.last
    return key < node.key


@register_jitable
def _write(node, key, count, last, entry, born):
    node.key = key
    node.count = count
    node.last = last
    node.entry = entry
    node.born = born


@register_jitable
def _sink(nodes, size, at, key, count, last, entry, born):
    """Put a row at ``at`` or, where smaller ones are below, further down."""
    while True:
        first = _CHILDREN * at + 1
        if first >= size:
            break
        child = first
        for other in range(first + 1, min(first + _CHILDREN, size)):
            if _less(nodes[other].count, nodes[other].last, nodes[other].key, nodes[child]):
                child = other
        if _less(count, last, key, nodes[child]):
            break
        nodes[at] = nodes[child]
        at = child
    _write(nodes[at], key, count, last, entry, born)


@register_jitable
def _is_valid(entries, node):
    entry = entries[node.entry]
    return entry.born == node.born and entry.key == node.key


@kernel
def push_all(entries, numbers, nodes, size):
    """Put entries into a heap that has room for them; returns its new size."""
    for number in numbers:
        entry = entries[number]
        at = size
        size += 1
        while at > 0:
            parent = (at - 1) // _CHILDREN
            if not _less(entry.count, entry.last, entry.key, nodes[parent]):
                break
            nodes[at] = nodes[parent]
            at = parent
        _write(nodes[at], entry.key, entry.count, entry.last, number, entry.born)
    return size


@kernel
def pop_smallest(entries, nodes, size, count):
    """Take the ``count`` least frequent rows out of a heap; returns their entries, and its new size."""
    numbers = np.empty(count, np.int32)
    taken = 0
    while taken < count:
        top = nodes[0]
        if _is_valid(entries, top):
            entry = entries[top.entry]
            if entry.count != top.count or entry.last != top.last:
                _sink(nodes, size, 0, entry.key, entry.count, entry.last, top.entry, entry.born)
                continue
            numbers[taken] = top.entry
            taken += 1
        size -= 1
        if size > 0:
            end = nodes[size]
            _sink(nodes, size, 0, end.key, end.count, end.last, end.entry, end.born)
    return numbers, size


@kernel
def keep_valid(entries, nodes, size):
    """Drop the nodes of rows that are gone; returns the new size."""
    kept = 0
    for i in range(size):
        if _is_valid(entries, nodes[i]):
            nodes[kept] = nodes[i]
            kept += 1
    for at in range((kept - 2) // _CHILDREN, -1, -1):
        node = nodes[at]
        key, count, last, entry, born = node.key, node.count, node.last, node.entry, node.born
        _sink(nodes, kept, at, key, count, last, entry, born)
    return kept
