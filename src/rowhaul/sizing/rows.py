"""What rows take in a store, by asking the store itself: its chunks, and its index.

An index grows in steps, so its bytes a key depend on how many keys there are. A real index is filled and
measured, once; growth is geometric, so that one of more than a million keys is taken for a smaller one at
the same place between two steps, and scaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rowhaul.optim import RowOptimizerRule, row_optimizer
from rowhaul.store import TableGroup, TableSpec
from rowhaul.store.arena import RecordArena

MEASURED_KEYS = 1 << 20
_AT_A_TIME = 1 << 13  # about the new keys of a batch
# What an index takes may depend on how many keys came at first; of these histories the worst one counts.
_FIRST_KEYS = (64, 2048)


@dataclass(frozen=True)
class RowShape:
    """What a row of a table consists of, where it is whole."""

    dim: int
    optimizer: RowOptimizerRule
    dtype: str

    @property
    def value_bytes(self) -> int:
        """Bytes of values in a row."""
        return self.dim * np.dtype(self.dtype).itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state in a row."""
        return self.optimizer.state_width(self.dim) * np.dtype(self.dtype).itemsize

    def stored_bytes(self, num_rows: int) -> int:
        """Bytes of the memory that holds so many rows, without their index."""
        arena = RecordArena(self.dim + self.optimizer.state_width(self.dim), self.dtype)
        num_chunks = -(-num_rows // (1 << arena.shift))
        return num_chunks * (arena.record_bytes << arena.shift)


def index_bytes(num_keys: int) -> int:
    """Bytes of the index of one table with so many keys."""
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
    """Numbers of keys, rising, and the bytes of an index that was given them, ``first`` at the beginning."""
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
