"""From any int64 key to the record that holds its row: open addressing, in shards.

Nothing is pre-indexed and nothing collides: a slot keeps the whole key. Several tables share one
index object, so that a batch over all of them is one pass. Each table has a few shards that grow
one at a time, which bounds both the pause and the extra memory of growing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.store.kernels import (
    EMPTY,
    SHARD_BITS,
    delete_keys,
    find_each,
    find_keys,
    insert_keys,
    rehash,
)

Int64s = npt.NDArray[np.int64]

NUM_SHARDS = 1 << SHARD_BITS
_SMALLEST_SHARD = 8
_MOST_FULL = 0.6  # of the slots; beyond, probes for absent keys get long


class KeyIndex:
    """Locations of the keys of ``num_tables`` tables.

    Batches give keys table by table: those of table ``t`` are ``keys[starts[t]:starts[t + 1]]``.
    """

    def __init__(self, num_tables: int) -> None:
        self.num_tables = num_tables
        self._shards = [_empty_shard(_SMALLEST_SHARD) for _ in range(num_tables * NUM_SHARDS)]
        self._addresses = self._find_addresses()
        self._masks = np.full(len(self._shards), _SMALLEST_SHARD - 1, dtype=np.int64)
        self._used = np.zeros(len(self._shards), dtype=np.int64)  # slots not EMPTY
        self._num_keys = np.zeros(num_tables, dtype=np.int64)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy (pickle, deepcopy) has shards of its own, at other addresses.
        self.__dict__.update(state)
        self._addresses = self._find_addresses()

    def _find_addresses(self) -> Int64s:
        return np.array([shard.ctypes.data for shard in self._shards], dtype=np.int64)

    @property
    def num_keys(self) -> Int64s:
        """Keys held, by table."""
        return self._num_keys.copy()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots, used or not."""
        return sum(shard.nbytes for shard in self._shards)

    def find(self, keys: Int64s, starts: Int64s) -> tuple[Int64s, Int64s]:
        """Location of each key (-1 where absent), and the number of absent keys by shard."""
        locations = np.empty(len(keys), dtype=np.int64)
        num_absent = np.zeros(len(self._shards), dtype=np.int64)
        find_keys(self._addresses, self._masks, keys, starts, locations, num_absent)
        return locations, num_absent

    def find_each(self, tables: Int64s, keys: Int64s) -> Int64s:
        """Location of each key of the table given with it (-1 where absent), in any order."""
        locations = np.empty(len(keys), dtype=np.int64)
        find_each(self._addresses, self._masks, tables, keys, locations)
        return locations

    def insert(
        self, keys: Int64s, starts: Int64s, locations: Int64s, num_absent: Int64s, records: Int64s
    ) -> Int64s:
        """Give the keys that `find` did not find, which must differ, the ``records`` in order.

        Fills their ``locations`` and returns which keys they are.
        """
        used = self._used + num_absent
        for shard in np.flatnonzero(used > _MOST_FULL * (self._masks + 1)):
            self._make_room(int(shard), int(num_absent[shard]))
        absent = np.empty(len(records), dtype=np.int64)
        insert_keys(self._addresses, self._masks, keys, starts, locations, records, absent)
        self._used += num_absent
        self._num_keys += num_absent.reshape(self.num_tables, NUM_SHARDS).sum(axis=1)
        return absent

    def delete(self, keys: Int64s, starts: Int64s) -> Int64s:
        """Forget the given keys, which must be there and differ; returns the locations they had."""
        locations, num_absent = self.find(keys, starts)
        if num_absent.any():
            raise KeyError(int(keys[np.flatnonzero(locations == EMPTY)[0]]))
        num_deleted = np.zeros(len(self._shards), dtype=np.int64)
        delete_keys(self._addresses, self._masks, keys, starts, num_deleted)
        self._used -= num_deleted
        self._num_keys -= np.diff(starts)
        return locations

    def blocks(self, table: int) -> Iterator[tuple[Int64s, Int64s]]:
        """All (keys, locations) of a table, a shard at a time, in no meaningful order."""
        for shard in range(table * NUM_SHARDS, (table + 1) * NUM_SHARDS):
            entries = self._shards[shard].reshape(-1, 2)
            live = entries[entries[:, 1] >= 0]
            yield np.ascontiguousarray(live[:, 0]), np.ascontiguousarray(live[:, 1])

    def _make_room(self, shard: int, num_more: int) -> None:
        old = self._shards[shard]
        num_live = int(np.count_nonzero(old[1::2] >= 0))
        # Each growth is a call, so small shards take long strides; large ones double.
        spare = 4 if num_live < 1 << 14 else 1.25
        num_slots = _SMALLEST_SHARD
        while _MOST_FULL * num_slots < spare * (num_live + num_more):
            num_slots *= 2
        grown = _empty_shard(num_slots)
        rehash(old, grown)
        self._shards[shard] = grown
        self._addresses[shard] = grown.ctypes.data
        self._masks[shard] = num_slots - 1
        self._used[shard] = num_live


def _empty_shard(num_slots: int) -> Int64s:
    return np.full(2 * num_slots, EMPTY, dtype=np.int64)  # key, location, key, location, ...
