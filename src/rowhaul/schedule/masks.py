"""Sets of workers as 64-bit masks, for kernels."""

from __future__ import annotations

import numpy as np
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import register_jitable

from rowhaul._kernels import kernel

NOBODY = np.uint64(0)
ONE = np.uint64(1)


@register_jitable
def bit(worker):
    """The mask of one worker."""
    return ONE << np.uint64(worker)


@register_jitable
def lowest(mask):
    """The lowest worker of a mask that is not empty."""
    return np.int64(trailing_zeros(mask))


@register_jitable
def popcount(mask):
    """How many workers a mask has, by adding up neighbouring bits, pairs, nibbles and bytes."""
    mask -= (mask >> ONE) & np.uint64(0x5555555555555555)
    mask = (mask & np.uint64(0x3333333333333333)) + ((mask >> np.uint64(2)) & np.uint64(0x3333333333333333))
    mask = (mask + (mask >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((mask * np.uint64(0x0101010101010101)) >> np.uint64(56))


@kernel
def trainers_of(offsets, rows, worker, num_rows):
    """The mask of workers that train each row."""
    trainers = np.zeros(num_rows, np.uint64)
    for i in range(len(worker)):
        mask = bit(worker[i])
        for at in range(offsets[i], offsets[i + 1]):
            trainers[rows[at]] |= mask
    return trainers
