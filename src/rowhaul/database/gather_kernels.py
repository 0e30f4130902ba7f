"""Compiled loops of the database: gather rows at memory speed, sum gradients by record."""

from __future__ import annotations

from numba import int64, uint64

from rowhaul._kernels import kernel
from rowhaul._memory import copy_bytes, leading_zeros, prefetch_to_read, record_address
from rowhaul._scramble import placed

_CACHE_LINE = 64
_BYTES_AHEAD = 8192  # prefetched ahead of the row being copied: more than a core's open misses


@kernel
def gather_rows(addresses, shift, record_bytes, locations, inverse, first, last, row_bytes, out_address):
    """Copy the values of entries ``first`` to ``last`` to ``out_address``, back to back.

    Entry ``i`` is the record ``locations[inverse[i]]``, or ``locations[i]`` if ``inverse`` is empty.
    """
    direct = len(inverse) == 0
    ahead = max(2, min(16, _BYTES_AHEAD // row_bytes))
    for i in range(first, last):
        later = min(i + ahead, last - 1)
        soon = record_address(
            addresses, shift, record_bytes, locations[later] if direct else locations[inverse[later]]
        )
        for offset in range(0, row_bytes, _CACHE_LINE):
            prefetch_to_read(soon + offset)
        record = locations[i] if direct else locations[inverse[i]]
        copy_bytes(
            out_address + (i - first) * row_bytes,
            record_address(addresses, shift, record_bytes, record),
            row_bytes,
        )


@kernel
def merge_rows(records, contents, slots, count, distinct, sums):
    """Add each row of ``contents`` to the sum of its record, in order; return the new number of records.

    ``count`` records already have sums, in ``distinct`` and ``sums``, which have room for all. ``slots`` is a
    hash table of their numbers: zeros at first, a power of two more than twice the number of records.
    """
    mask = len(slots) - 1
    shift = uint64(leading_zeros(uint64(mask)))
    dim = sums.shape[1]
    for i in range(len(records)):
        record = records[i]
        slot = int64(placed(record) >> shift)
        while True:
            at = slots[slot] - 1
            if at < 0:
                slots[slot] = count + 1
                distinct[count] = record
                for k in range(dim):
                    sums[count, k] = contents[i, k]
                count += 1
                break
            if distinct[at] == record:
                for k in range(dim):
                    sums[at, k] += contents[i, k]
                break
            slot = (slot + 1) & mask
    return count
