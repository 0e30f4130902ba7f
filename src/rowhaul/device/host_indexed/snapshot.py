"""`CardSnapshot`: rows on a card at one moment, copied before training goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.device.host_indexed.arena import CardArena
from rowhaul.store import TableSpec
from rowhaul.store.index import Int64s, KeyIndex


class CardSnapshot:
    """A copy of all rows of a group; takes as much host memory as they take on the card."""

    def __init__(self, tables: Sequence[TableSpec], index: KeyIndex, arena: CardArena) -> None:
        parts = [
            [np.concatenate(one) for one in zip(*index.blocks(table), strict=True)]
            for table in range(len(tables))
        ]
        nothing = [np.empty(0, np.int64)] * 2
        self._rows = [tuple(part) if part else tuple(nothing) for part in parts]
        counts = [len(keys) for keys, _ in self._rows]
        self._first = np.cumsum([0, *counts])
        records = np.concatenate([np.empty(0, np.int64), *(records for _, records in self._rows)])
        self._contents = arena.read(records)
        self._marks = np.zeros(int(records.max(initial=-1)) + 1, np.bool_)  # by record

    def mark(self, tables: Int64s, records: Int64s) -> None:
        """Mark records, which differ and have no mark."""
        self._marks[records] = True

    def blocks(self, table: int, *, marked: bool = False) -> Iterator[tuple[Int64s, npt.NDArray[Any]]]:
        """Yield the rows of a table, with a mark or without."""
        keys, records = self._rows[table]
        some = np.flatnonzero(self._marks[records] == marked)
        if len(some):
            yield keys[some], self._contents[self._first[table] + some]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the copy."""
        return int(self._contents.nbytes)

    @property
    def is_crowded(self) -> bool:
        """Nothing has to be copied while it is read."""
        return False

    def close(self) -> None:
        """Free the copy."""
        self._contents = self._contents[:0]
