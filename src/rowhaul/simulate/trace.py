"""The trace: kept in memory where it fits, and its rows counted, for caches in percent and for hot rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rowhaul.schedule import HotRows, IdBatch
from rowhaul.simulate.measure import Batches

KEPT_BYTES = 1 << 29

Int64s = npt.NDArray[np.int64]


class RememberedTrace:
    """Gives the batches of ``read``, from memory if they take no more than ``limit`` bytes.

    A simulation runs over the same trace once for every mechanism and every candidate of shares.
    """

    def __init__(self, read: Batches, limit: int = KEPT_BYTES) -> None:
        self._read = read
        self._kept = self._keep(limit)

    def __call__(self) -> Iterable[IdBatch]:
        """The trace from its beginning."""
        return self._read() if self._kept is None else self._kept

    def _keep(self, limit: int) -> list[IdBatch] | None:
        kept, num_bytes = [], 0
        for batch in self._read():
            num_bytes += batch.offsets.nbytes + batch.tables.nbytes + batch.keys.nbytes
            if num_bytes > limit:
                return None
            kept.append(batch)
        return kept


class RowCounter:
    """Counts the distinct keys of each table, exactly, in 16 bytes per distinct key and some room to sort."""

    def __init__(self, num_tables: int) -> None:
        self._keys = [np.empty(0, np.int64) for _ in range(num_tables)]
        self._times = [np.empty(0, np.int64) for _ in range(num_tables)]
        self._waiting: list[list[Int64s]] = [[] for _ in range(num_tables)]
        self._num_waiting = np.zeros(num_tables, np.int64)

    def add(self, table: int, keys: Int64s) -> None:
        """Count some keys of a table."""
        self._waiting[table].append(keys)
        self._num_waiting[table] += len(keys)
        if self._num_waiting[table] > max(1 << 20, len(self._keys[table])):
            self._merge(table)

    def num_distinct(self) -> Int64s:
        """Distinct keys of each table."""
        for table in range(len(self._keys)):
            self._merge(table)
        return np.array([len(keys) for keys in self._keys], np.int64)

    def most_frequent(self, count: int) -> HotRows:
        """The ``count`` rows seen most often; of equals, those of the lower table, then key."""
        return self.ranked(count)[0]

    def ranked(self, count: int) -> tuple[HotRows, Int64s]:
        """As `most_frequent`, and how often each was seen; the rows are ordered by (table, key)."""
        tables = np.repeat(np.arange(len(self._keys), dtype=np.int32), self.num_distinct())
        keys, times = np.concatenate(self._keys), np.concatenate(self._times)
        chosen = np.sort(np.argsort(-times, kind="stable")[:count])
        return HotRows(tables=tables[chosen], keys=keys[chosen]), times[chosen]

    def _merge(self, table: int) -> None:
        if not self._waiting[table]:
            return
        keys, times = np.unique(np.concatenate(self._waiting[table]), return_counts=True)
        self._waiting[table].clear()
        self._num_waiting[table] = 0
        both, place = np.unique(np.concatenate([self._keys[table], keys]), return_inverse=True)
        summed = np.zeros(len(both), np.int64)
        summed[place[: len(self._keys[table])]] = self._times[table]
        summed[place[len(self._keys[table]) :]] += times
        self._keys[table], self._times[table] = both, summed
