"""Narrowing the rows of a cluster to the columns that are kept, once, when all are at home.

See `rowhaul.pruning.narrowing` for how columns are chosen and what becomes of chunks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.layout import ChunkLayout, fresh_records
from rowhaul.pruning.narrowing import WholeRows
from rowhaul.runtime.mover import Mover
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.store.keyed import locate

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]


def narrow(mover: Mover, layout: ChunkLayout) -> None:
    """Narrow the rows of a rank that is at rest, with an empty cache."""
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
        whole = WholeRows(_first_values(before, table, keys), layout.optimizer)
        there = []  # by place: the rows that have the chunk
        for place in range(layout.num_chunks):
            number, position = home.place_of(table * layout.num_chunks + place)
            group = home.groups[number]
            found = locate(group, np.full(len(keys), position), keys)
            there.append(np.flatnonzero(found >= 0))
            columns = slice(int(before.starts[place]), int(before.starts[place + 1]))
            whole.put(there[-1], columns, group.arena.read(found[there[-1]]))
        for place, rows in enumerate(there):
            kept = layout.column_matrix[table, layout.starts[place] : layout.starts[place + 1]]
            number, position = made.place_of(table * layout.num_chunks + place)
            made.groups[number].load(position, keys[rows], whole.records(rows, kept))
    return made


def _keys_of(home: RowMemory, layout: ChunkLayout, table: int) -> Ints:
    """The rows of a table that a home has chunks of."""
    found = [np.empty(0, np.int64)]
    for place in range(layout.num_chunks):
        number, position = home.place_of(table * layout.num_chunks + place)
        found += [keys for keys, _ in home.groups[number].index.blocks(position)]
    return np.unique(np.concatenate(found))


def _first_values(layout: ChunkLayout, table: int, keys: Ints) -> Numbers:
    """The whole rows that keys of a table start with."""
    fresh, first = RowMemory(layout), table * layout.num_chunks
    sizes = enumerate(layout.cut.sizes)
    return np.concatenate(
        [fresh_records(fresh, first + place, keys)[:, :size] for place, size in sizes], axis=1
    )
