"""Keeping only the important columns of each table: the second dimension of pruning.

While training begins, the squares of the gradients of pooled vectors are summed column by column; after a
cold start every table keeps the columns with the largest sums, and its rows shrink to them. A row still has
as many chunks, which now hold fewer values: a chunk that was there stays, with its utility. Its values are
the ones its columns had; columns whose chunk was pruned start with their first values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning.layout import ChunkLayout, fresh_records
from rowhaul.runtime.mover import Mover
from rowhaul.runtime.row_memory import RowMemory
from rowhaul.store.keyed import locate

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[Any]


def best_columns(sums: Floats, count: int) -> Int64s:
    """The ``count`` columns of each table with the largest sums, ascending; of equal ones the first."""
    return np.sort(np.argsort(-sums, axis=1, kind="stable")[:, :count], axis=1)


def add_squares(
    pooled_gradients: Numbers, offsets: Int64s, columns: Int64s, tables: Int64s, sums: Floats
) -> None:
    """Add the squared gradients of features' pooled vectors to the sums of their tables, by column.

    A sum over samples, so it does not matter which worker has which of them. ``columns`` are the first ones
    of the features in the output, ``offsets`` those of their bags: empty ones read no row.
    """
    num_samples, dim = len(pooled_gradients), sums.shape[1]
    lengths = np.diff(offsets).reshape(len(columns), num_samples)
    for feature, (first, table) in enumerate(zip(columns.tolist(), tables.tolist(), strict=True)):
        some = pooled_gradients[lengths[feature] > 0, first : first + dim].astype(np.float64)
        sums[table] += np.einsum("ij,ij->j", some, some)


class WholeRows:
    """Rows with all their columns, and as many planes of state; as they start where a chunk is not there.

    Args:
        values: the rows as they start.
        optimizer: of rows.
    """

    def __init__(self, values: Numbers, optimizer: RowOptimizerRule) -> None:
        self._values = values
        self._is_one_number = optimizer.state_width(8) == 1  # however many values there are
        num_planes = 1 if self._is_one_number else optimizer.state_width(8) // 8
        self._state = [np.full_like(values, optimizer.initial_state) for _ in range(num_planes)]

    def put(self, rows: Int64s, columns: slice, records: Numbers) -> None:
        """Set chunks of some rows, which hold these columns."""
        size = columns.stop - columns.start
        self._values[rows, columns] = records[:, :size]
        for number, plane in enumerate(self._state):
            begin = size + number * size
            end = begin + (1 if self._is_one_number else size)
            plane[rows, columns] = records[:, begin:end]  # one number is that of every column

    def records(self, rows: Int64s, columns: Int64s) -> Numbers:
        """Chunks of some rows that hold these columns."""
        where = rows[:, None], columns
        parts = [self._values[where], *(plane[where] for plane in self._state)]
        if self._is_one_number:
            parts[1] = parts[1].mean(axis=1, dtype=parts[1].dtype, keepdims=True)
        return np.concatenate(parts, axis=1)


def narrow_rank(mover: Mover, layout: ChunkLayout) -> None:
    """Narrow the rows of a rank that is at rest, with an empty cache."""
    if mover.cache is not None:
        mover.cache = RowMemory(layout, makes_rows=False)
    if mover.home is not None:
        mover.home = _narrowed(mover.home, layout)


def _narrowed(home: RowMemory, layout: ChunkLayout) -> RowMemory:
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
            columns = slice(int(before.cut.starts[place]), int(before.cut.starts[place + 1]))
            whole.put(there[-1], columns, group.arena.read(found[there[-1]]))
        for place, rows in enumerate(there):
            kept = layout.column_matrix[table, layout.cut.starts[place] : layout.cut.starts[place + 1]]
            number, position = made.place_of(table * layout.num_chunks + place)
            made.groups[number].load(position, keys[rows], whole.records(rows, kept))
    return made


def _keys_of(home: RowMemory, layout: ChunkLayout, table: int) -> Int64s:
    """The rows of a table that a home has chunks of."""
    found = [np.empty(0, np.int64)]
    for place in range(layout.num_chunks):
        number, position = home.place_of(table * layout.num_chunks + place)
        found += [keys for keys, _ in home.groups[number].index.blocks(position)]
    return np.unique(np.concatenate(found))


def _first_values(layout: ChunkLayout, table: int, keys: Int64s) -> Numbers:
    """The whole rows that keys of a table start with."""
    fresh, first = RowMemory(layout), table * layout.num_chunks
    sizes = enumerate(layout.cut.sizes)
    return np.concatenate(
        [fresh_records(fresh, first + place, keys)[:, :size] for place, size in sizes], axis=1
    )
