"""The records of a rank's memory as they were between two segments, read while training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.row_memory import RowMemory
from rowhaul.store.keyed import locate
from rowhaul.store.snapshot import GroupSnapshot

Ints = npt.NDArray[np.int64]


class MemorySnapshot:
    """Snapshots of all tables of a cache or a home, without the gradients that wait there."""

    def __init__(self, memory: RowMemory) -> None:
        self._memory = memory
        self._groups: list[GroupSnapshot] = []
        try:
            for group in memory.groups:
                self._groups.append(group.snapshot())
        except BaseException:
            self.close()
            raise

    def mark(self, tables: npt.NDArray[Any], keys: Ints) -> int:
        """Mark those of these rows that are there, before training goes on; returns how many they are."""
        count = 0
        for number, places, positions in self._memory.by_group(tables):
            found = locate(self._memory.groups[number], positions, keys[places])
            there = np.flatnonzero(found >= 0)
            self._groups[number].mark(positions[there], found[there])
            count += len(there)
        return count

    def blocks(self, table: int, *, marked: bool) -> Iterator[tuple[Ints, npt.NDArray[Any]]]:
        """Yield the rows of a table that have a mark, or that have none, as blocks of (keys, records)."""
        number, position = self._memory.place_of(table)
        return self._groups[number].blocks(position, marked=marked)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the snapshot takes by now."""
        return sum(group.allocated_bytes for group in self._groups)

    @property
    def is_crowded(self) -> bool:
        """Whether it should be read faster."""
        return any(group.is_crowded for group in self._groups)

    def close(self) -> None:
        """Free the snapshot."""
        for group in self._groups:
            group.close()
