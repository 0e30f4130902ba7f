"""Find the distinct keys among many: the one hash loop that the store and the scheduler share."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from rowhaul._kernels import kernel

MIX = np.uint64(0x9E3779B97F4A7C15)
ONE = np.uint64(1)


@register_jitable
def num_seats(num_keys):
    """The size of a hash table for ``num_keys`` keys: a power of two, at most half full."""
    size = np.int64(16)
    while size < 2 * num_keys:
        size *= 2
    return size


@kernel
def number_keys(keys, first, end, seats, size, known, count, numbers):
    """Number the distinct keys of ``keys[first:end]`` in the order in which they first appear.

    Fills ``numbers[first:end]`` and returns the count of distinct keys. The key numbered n is written to
    ``known[n + 1]``; ``known[0]`` is scratch, as 0 is an empty seat. Numbers begin at ``count``: for 0,
    ``seats[:size]`` must be zeros, otherwise as an earlier call left them.
    """
    mask, count = np.uint64(size - 1), np.uint64(count)
    for at in range(first, end):
        key = keys[at]
        mixed = np.uint64(key) * MIX
        seat = (mixed ^ (mixed >> np.uint64(32))) & mask
        taken = np.uint64(seats[seat])
        # One branch, which is hardly ever taken: no processor could foresee which key is new.
        while (taken != 0) & (known[taken] != key):
            seat = (seat + ONE) & mask
            taken = np.uint64(seats[seat])
        new = taken == 0
        count += np.uint64(new)
        number = count if new else taken
        seats[seat] = number
        known[number] = key
        numbers[at] = number - ONE
    return np.int64(count)
