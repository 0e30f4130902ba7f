"""Find the distinct keys among many: the one hash loop that the store and the scheduler share.

Numbers follow the order of the keys, wherever they sit; where that is, nobody can compute beforehand.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from rowhaul._kernels import kernel
from rowhaul._memory import leading_zeros
from rowhaul._scramble import scrambled

_BLOCK = 64
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
    shift = np.uint64(leading_zeros(mask))
    wanted = np.empty(_BLOCK, np.uint64)
    for begin in range(first, end, _BLOCK):
        stop = min(begin + _BLOCK, end)
        for j in range(stop - begin):  # several at a time, and out of the way of what depends on them
            wanted[j] = scrambled(keys[begin + j]) >> shift
        for at in range(begin, stop):
            key, seat = keys[at], wanted[at - begin]
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
