"""Keeping only the important columns of each table: the second dimension of pruning.

While training begins, the squares of each column's gradients are summed; after a cold start every table keeps
the columns with the largest sums and its rows shrink to them. A row still has as many chunks, which now
hold fewer values: a chunk that was there stays there, under its number and with its utilities. Its values
are the ones its columns had; columns whose chunk was pruned start with their first values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.pruning.pool.pool import ChunkPool, chunk_starts
from rowhaul.pruning.pool.tables import PrunedTables
from rowhaul.pruning.settings import PruneSettings
from rowhaul.store.index import Int64s

Floats = npt.NDArray[np.float64]


class Dimensions:
    """What is known about the columns of tables, until it is decided which stay.

    Args:
        settings: how many stay, and when that is decided.
        dims: the columns of each table.
    """

    def __init__(self, settings: PruneSettings, dims: Sequence[int]) -> None:
        self._keep, self._after = settings.num_columns(max(dims)), settings.cold_start
        self.is_open = bool(self._keep)  # whether gradients are still summed
        # By table and column, of squared gradients.
        self.sums: Floats = np.zeros((len(dims), max(dims) if self.is_open else 0))

    def is_due(self, number: int) -> bool:
        """Whether it is decided after step ``number``."""
        return self.is_open and number >= self._after

    def shrink(self, pool: ChunkPool, groups: Sequence[PrunedTables]) -> None:
        """Decide for every table, and make all rows smaller."""
        self.close(pool, groups, best_columns(self.sums, self._keep))

    def close(self, pool: ChunkPool, groups: Sequence[PrunedTables], kept: Int64s) -> None:
        """Make all rows smaller: ``kept`` are the columns that each table keeps, ascending."""
        starts = chunk_starts(kept.shape[1], pool.num_chunks)
        first = 0
        for group in groups:
            for table in range(len(group.tables)):
                _rewrite(pool, group, table, kept[first + table], starts)
            group.columns = np.ascontiguousarray(kept[first : first + len(group.tables)])
            group.scattered = kept.shape[1] < group.dim
            first += len(group.tables)
        pool.narrow(kept.shape[1])
        self.is_open, self.sums = False, np.zeros((len(self.sums), 0))


def best_columns(sums: Floats, count: int) -> Int64s:
    """The ``count`` columns of each table with the largest sums, ascending; of equal ones the first."""
    return np.sort(np.argsort(-sums, axis=1, kind="stable")[:, :count], axis=1)


def _rewrite(pool: ChunkPool, group: PrunedTables, table: int, kept: Int64s, starts: Int64s) -> None:
    """Put what chunks are to hold at the beginning of the records they have now."""
    for keys, chunks in group.chunk_blocks(table):
        values, state = _whole_rows(pool, group, table, keys, chunks)
        for place in range(pool.num_chunks):
            columns = kept[starts[place] : starts[place + 1]]
            there = chunks[:, place] >= 0
            parts = [values[there][:, columns], *(plane[there][:, columns] for plane in state)]
            if _is_one_number(pool):
                parts[1] = parts[1].mean(axis=1, dtype=parts[1].dtype, keepdims=True)
            records = np.concatenate(parts, axis=1)
            padded = np.zeros((len(records), pool.arena.width), dtype=group.dtype)
            padded[:, : records.shape[1]] = records
            pool.arena.write(chunks[there, place].astype(np.int64), padded)


def _whole_rows(
    pool: ChunkPool, group: PrunedTables, table: int, keys: Int64s, chunks: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[Any], list[npt.NDArray[Any]]]:
    """Values of all columns, and as many planes of state; as they start where a chunk is pruned."""
    values = group.first_values(table, keys)
    num_planes = 1 if _is_one_number(pool) else int(pool.state_widths[0] // pool.sizes[0])
    state = [np.full(values.shape, group.optimizer.initial_state, group.dtype) for _ in range(num_planes)]
    for place, size in enumerate(pool.sizes):
        there = np.flatnonzero(chunks[:, place] >= 0)
        columns = slice(pool.starts[place], pool.starts[place + 1])
        records = pool.arena.read(chunks[there, place].astype(np.int64))
        values[there, columns] = records[:, :size]
        for number, plane in enumerate(state):
            begin = size + number * size
            end = begin + (1 if _is_one_number(pool) else size)
            plane[there, columns] = records[:, begin:end]  # one number is that of every column
    return values, state


def _is_one_number(pool: ChunkPool) -> bool:
    """Whether the state is one number however many values there are."""
    return pool.optimizer.state_width(8) == 1
