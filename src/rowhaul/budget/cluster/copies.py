"""Copies of rows within a budget, for ranks that only read: ids find them through the maps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rowhaul.budget.layout import SlotLayout
from rowhaul.budget.maps import SlotMaps
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.local_rows import TableRows
from rowhaul.optim import SGD
from rowhaul.runtime.layout import CopiedRows
from rowhaul.runtime.lookups import Rows
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.store import Lookup, TableGroup

Ints = npt.NDArray[np.int64]


class CopiedSlots(CopiedRows):
    """Copies of slots and shared rows, values only.

    Args:
        groups: the features.
        layout: of the tables.
        maps: that find rows; they must not change.
    """

    def __init__(self, groups: Sequence[FeatureGroup], layout: SlotLayout, maps: SlotMaps) -> None:
        tables = [group.make_tables(SGD(lr=0.0), layout.seed, layout.row_dtype) for group in groups]
        memory = RowMemory(layout, tables, makes_rows=False)
        self._maps = maps
        super().__init__(memory, _ReadSlots(groups, memory, maps))

    def records_of(self, rows: Rows) -> Rows:
        """Name the rows that ids read, each once."""
        order = np.argsort(rows.tables, kind="stable")
        tables, keys = rows.tables[order], rows.keys[order]
        found = find_rows(self._maps, keys, np.bincount(tables, minlength=len(self.memory.layout.specs)))
        pairs = np.unique(np.stack([tables, found], axis=1), axis=0)
        return Rows(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]))


class _ReadSlots(TableRows):
    """A row source that resolves ids, and only reads."""

    def __init__(self, groups: Sequence[FeatureGroup], memory: RowMemory, maps: SlotMaps) -> None:
        super().__init__(groups, memory.groups)
        self._maps, self._num_tables = maps, len(memory.layout.specs)
        numbers = {spec.name: number for number, spec in enumerate(memory.layout.specs)}
        self._numbers = [np.array([numbers[one.name] for one in group.specs]) for group in groups]

    def look_up(self, number: int, ids: tuple[Ints, Ints, Ints], training: bool, on_unknown: str) -> Lookup:
        """Locate the rows that a group's ids read; a shared row that nobody has trained is as it begins."""
        tables: TableGroup = self.tables[number]
        keys, starts, inverse = tables.distinct(*ids)
        counts = np.zeros(self._num_tables, np.int64)
        counts[self._numbers[number]] = np.diff(starts)
        rows = find_rows(self._maps, keys, counts)
        return tables.lookup(rows[inverse], *ids[1:], insert=False, on_unknown="init")


def find_rows(maps: SlotMaps, keys: Ints, counts: Ints) -> Ints:
    """Find the rows that distinct ids read, given table by table, so many of each."""
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return maps.find(keys, starts, np.ones(len(keys), np.int64)).rows
