"""The compiled loop that looks many rows up in an index at once."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel
from rowhaul._memory import prefetch_to_read
from rowhaul.schedule.directory.index_kernels import index_value
from rowhaul.schedule.id_kernels import row_hash

_AHEAD = 16  # how many rows ahead of their use scattered memory is asked for


@kernel
def find_values(places, tables, keys):
    """What an index has of rows, -1 of those that it does not have."""
    count = len(keys)
    mask = np.int64(len(places) - 1)
    address = np.int64(places.ctypes.data)
    first = np.empty(count, np.int64)
    for r in range(count):
        first[r] = np.int64(row_hash(tables[r], keys[r])) & mask
    values = np.empty(count, np.int32)
    for r in range(count):
        if r + _AHEAD < count:
            prefetch_to_read(address + first[r + _AHEAD] * 16)
        place = first[r]
        word = places[place, 1]
        while word != 0 and not (places[place, 0] == keys[r] and (word >> 32) == tables[r]):
            place = (place + 1) & mask
            word = places[place, 1]
        values[r] = index_value(word) if word != 0 else -1
    return values
