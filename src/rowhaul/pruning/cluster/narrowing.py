"""Keeping only the important columns of every table, on a cluster: once, after a cold start.

Every worker has summed the squares of the gradients it saw, column by column; all ranks add these up in the
same order, and choose the same columns. Then all rows are at home, and homes write them anew: see
`rowhaul.pruning.pool.shrink` for what becomes of chunks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.layout import ChunkLayout
from rowhaul.runtime.mover import Mover
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.store.keyed import locate

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]


def narrow(mover: Mover, layout: ChunkLayout) -> None:
    """Let a rank, at rest and with an empty cache, hold rows of fewer columns."""
    if mover.cache is not None:
        mover.cache = RowMemory(layout, makes_rows=False)
    if mover.home is not None:
        mover.home = narrowed(mover.home, layout)


def narrowed(home: RowMemory, layout: ChunkLayout) -> RowMemory:
    """The rows of a home with fewer columns; there is as much of each row as before."""
    before = home.layout
    assert isinstance(before, ChunkLayout)
    made = RowMemory(layout)
    for table in range(len(layout.rows)):
        keys = _keys_of(home, before, table)
        if not len(keys):
            continue
        whole = _WholeRows(home, before, table, keys)
        kept = layout.column_matrix[table]
        for place in range(layout.num_chunks):
            columns = kept[layout.starts[place] : layout.starts[place + 1]]
            there = whole.present[:, place]
            number, position = made.place_of(table * layout.num_chunks + place)
            made.groups[number].load(position, keys[there], whole.records(there, columns))
    return made


class _WholeRows:
    """Values of all columns, and as many planes of state; as they start where a chunk is not there."""

    def __init__(self, home: RowMemory, layout: ChunkLayout, table: int, keys: Ints) -> None:
        rule, dim = layout.optimizer, layout.rows[0].dim
        self._is_one_number = rule.state_width(8) == 1
        num_planes = 1 if self._is_one_number else rule.state_width(8) // 8
        self.values, self.state = _first_values(layout, table, keys), []
        self.present = np.zeros((len(keys), layout.num_chunks), np.bool_)
        for _ in range(num_planes):
            self.state.append(np.full((len(keys), dim), rule.initial_state, layout.dtype))
        for place in range(layout.num_chunks):
            number, position = home.place_of(table * layout.num_chunks + place)
            group = home.groups[number]
            found = locate(group, np.full(len(keys), position), keys)
            there = np.flatnonzero(found >= 0)
            self.present[there, place] = True
            records, size = group.arena.read(found[there]), group.dim
            columns = slice(int(layout.starts[place]), int(layout.starts[place + 1]))
            self.values[there, columns] = records[:, :size]
            for plane_number, plane in enumerate(self.state):
                begin = size + plane_number * size
                end = begin + (1 if self._is_one_number else size)
                plane[there, columns] = records[:, begin:end]  # one number is that of every column

    def records(self, there: npt.NDArray[np.bool_], columns: Ints) -> Numbers:
        """Chunks of some rows that hold these columns."""
        parts = [self.values[there][:, columns], *(plane[there][:, columns] for plane in self.state)]
        if self._is_one_number:
            parts[1] = parts[1].mean(axis=1, dtype=parts[1].dtype, keepdims=True)
        return np.concatenate(parts, axis=1)


def _keys_of(home: RowMemory, layout: ChunkLayout, table: int) -> Ints:
    """The rows of a table that a home has chunks of."""
    found = [np.empty(0, np.int64)]
    for place in range(layout.num_chunks):
        number, position = home.place_of(table * layout.num_chunks + place)
        found += [keys for keys, _ in home.groups[number].index.blocks(position)]
    return np.unique(np.concatenate(found))


def _first_values(layout: ChunkLayout, table: int, keys: Ints) -> Numbers:
    """The whole rows that keys of a table start with."""
    fresh = RowMemory(layout)
    parts = []
    for place in range(layout.num_chunks):
        number, position = fresh.place_of(table * layout.num_chunks + place)
        group = fresh.groups[number]
        parts.append(group.arena.read(group.make_fresh(np.full(len(keys), position), keys))[:, : group.dim])
    return np.concatenate(parts, axis=1)
