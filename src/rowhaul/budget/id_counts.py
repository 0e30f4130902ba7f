"""`IdCounts`: how often ids are read, exactly, for a sample of the ids that is as large as memory allows.

An id is in the sample if its hash is small; counts are of all its reads. When there are too many, the bound
is halved and half of them go: what remains is always a fair sample, and the same for any order of the ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.budget.slots import Int64s

MOST_IDS = 1 << 23  # held at a time, some 16 bytes each
_AT_A_TIME = 1 << 22  # reads that are sorted together
_MIX = 0x9E3779B97F4A7C15

Words = npt.NDArray[np.uint64]


class IdCounts:
    """Counts of reads by id.

    Args:
        most_ids: that are held at a time.
    """

    def __init__(self, most_ids: int = MOST_IDS) -> None:
        self._most_ids = most_ids
        self._hashed: Words = np.empty(0, np.uint64)  # sorted
        self._counts: Int64s = np.empty(0, np.int64)
        self._new: list[Words] = []
        self._num_new = 0
        self._halvings = 0

    def add(self, table: int, keys: Int64s) -> None:
        """Add reads of a table, each as often as it occurs."""
        seed = _mixed(np.array([(table + 1) * _MIX % 2**64], np.uint64))
        hashed = _mixed(keys.view(np.uint64) ^ seed)
        if self._halvings:
            hashed = hashed[hashed < self._bound]
        self._new.append(hashed)
        self._num_new += len(hashed)
        if self._num_new >= _AT_A_TIME:
            self._join()

    @property
    def share(self) -> float:
        """The share of all ids that is in the sample."""
        return 0.5**self._halvings

    def counts(self) -> Int64s:
        """Return how often each id of the sample was read, most first."""
        self._join()
        return np.sort(self._counts)[::-1]

    @property
    def _bound(self) -> np.uint64:
        return np.uint64(2 ** (64 - self._halvings) - 1)

    def _join(self) -> None:
        new, counts = np.unique(np.concatenate([self._hashed[:0], *self._new]), return_counts=True)
        self._new, self._num_new = [], 0
        self._hashed, where = np.unique(np.concatenate([self._hashed, new]), return_inverse=True)
        summed = np.bincount(where, np.concatenate([self._counts, counts]), minlength=len(self._hashed))
        self._counts = summed.astype(np.int64)
        while len(self._hashed) > self._most_ids:
            self._halvings += 1
            kept = int(np.searchsorted(self._hashed, self._bound))
            self._hashed, self._counts = self._hashed[:kept].copy(), self._counts[:kept].copy()


def _mixed(words: Words) -> Words:
    """The finalizer of splitmix64: every bit moves every other."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
