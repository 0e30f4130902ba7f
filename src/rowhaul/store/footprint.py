"""What records and their index take in a store, measured on the store itself.

An index grows in steps, so its bytes per key depend on how many keys there are. A real index is filled and
measured once. Growth is geometric: an index of more than a million keys is scaled from a smaller one at the
same place between two steps.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rowhaul.optim import row_optimizer
from rowhaul.store.arena import RecordArena
from rowhaul.store.tables import TableGroup, TableSpec

MEASURED_KEYS = 1 << 20
_AT_A_TIME = 1 << 13  # about the new keys of a batch
# What an index takes may depend on how many keys came first; the worst of these histories counts.
_FIRST_KEYS = (64, 2048)


def records_bytes(num_records: int, record_bytes: int) -> int:
    """Bytes of the memory that holds records, without their index."""
    arena = RecordArena(max(record_bytes, 1), np.uint8)
    return -(-num_records // (1 << arena.shift)) * (arena.record_bytes << arena.shift)


def index_bytes(num_keys: int) -> int:
    """Bytes of the index of one table with ``num_keys`` keys."""
    halvings = max(0, (num_keys - 1) // MEASURED_KEYS).bit_length()
    smaller = -(-num_keys >> halvings)
    found = [0]
    for first in _FIRST_KEYS:
        sizes, taken = _measured_index(first)
        if first <= smaller or first == _FIRST_KEYS[0]:
            found.append(int(taken[np.searchsorted(sizes, smaller)]))
    return max(found) << halvings


@lru_cache(maxsize=len(_FIRST_KEYS))
def _measured_index(first: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rising numbers of keys, and the bytes of an index that was given them, ``first`` to begin with."""
    group = TableGroup([TableSpec("t", 1, 0.0, 0.0)], row_optimizer("sgd", lr=0.0), "float32", 0)
    keys = np.unique(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, MEASURED_KEYS + 64))
    keys = np.random.default_rng(1).permutation(keys)[:MEASURED_KEYS]
    sizes, taken = [0], [group.index.allocated_bytes]
    while sizes[-1] < MEASURED_KEYS:
        step = max(first, min(_AT_A_TIME, sizes[-1] >> 4))
        some = keys[sizes[-1] : sizes[-1] + step]
        group.make_fresh(np.zeros(len(some), np.int64), some)
        sizes.append(sizes[-1] + len(some))
        taken.append(group.index.allocated_bytes)
    return np.array(sizes), np.array(taken)
