"""A heap in an array of records, for kernels: smallest (major, minor, stamp) first.

Records have the fields ``major``, ``minor``, ``stamp``, ``item`` and ``ticket``, of any integer types. A
heap is ``entries[root : root + length]``.
"""

from __future__ import annotations

from numba.extending import register_jitable

CHILDREN = 4  # of a node: a flat heap waits for memory less often than a binary one


@register_jitable
def _less(major, minor, stamp, entry):
    if major != entry.major:
        return major < entry.major
    if minor != entry.minor:
        return minor < entry.minor
    return stamp < entry.stamp


@register_jitable
def _write(entry, major, minor, stamp, item, ticket):
    entry.major = major
    entry.minor = minor
    entry.stamp = stamp
    entry.item = item
    entry.ticket = ticket


@register_jitable
def sift_up(entries, root, at, major, minor, stamp, item, ticket):
    """Put an entry at ``at`` or, where larger ones are above, further up."""
    while at > 0:
        parent = (at - 1) // CHILDREN
        if not _less(major, minor, stamp, entries[root + parent]):
            break
        entries[root + at] = entries[root + parent]
        at = parent
    _write(entries[root + at], major, minor, stamp, item, ticket)


@register_jitable
def sift_down(entries, root, length, at, major, minor, stamp, item, ticket):
    """Put an entry at ``at`` or, where smaller ones are below, further down."""
    while True:
        first = CHILDREN * at + 1
        if first >= length:
            break
        child = first
        smallest = entries[root + first]
        for other in range(first + 1, min(first + CHILDREN, length)):
            entry = entries[root + other]
            if _less(entry.major, entry.minor, entry.stamp, smallest):
                child, smallest = other, entry
        if _less(major, minor, stamp, smallest):
            break
        entries[root + at] = smallest
        at = child
    _write(entries[root + at], major, minor, stamp, item, ticket)


@register_jitable
def _sift_from(entries, root, length, at, source):
    entry = entries[root + source]
    sift_down(entries, root, length, at, entry.major, entry.minor, entry.stamp, entry.item, entry.ticket)


@register_jitable
def pop(entries, root, length):
    """Remove the top of a heap."""
    _sift_from(entries, root, length - 1, 0, length - 1)


@register_jitable
def heapify(entries, root, length):
    """Make a heap of entries in any order."""
    for at in range((length - 2) // CHILDREN, -1, -1):
        _sift_from(entries, root, length, at, at)
