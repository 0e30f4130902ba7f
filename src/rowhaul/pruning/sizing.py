"""What pruned tables take, by asking the pruner how much room it would make.

How many chunks and entries there may be follows from the settings and from how many different rows come
(`rowhaul.pruning.room`); a pool is never larger. Before columns are chosen rows have all of them, so
where `prune.dims` or two dimensions are in force there are two such sums, and the larger one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rowhaul.optim import RowOptimizerRule
from rowhaul.pruning.cut import part_sizes
from rowhaul.pruning.deciding.room import Sizes, check_batch, room_for
from rowhaul.pruning.settings import PruneSettings
from rowhaul.sizing.rows import index_bytes
from rowhaul.store.arena import RecordArena

_GROWING = 1.5  # arrays of a log of utilities grow by half
_LEDGER_ROW, _LEDGER_CHUNK = 4, 4


@dataclass(frozen=True)
class Held:
    """What tables hold together, at most."""

    num_chunks: int
    num_entries: int
    chunk_values: int  # bytes of values in a chunk
    chunk_bytes: int  # with its state
    entry_bytes: int
    chunks_of_row: int

    @property
    def bytes(self) -> int:
        """Chunks and entries, without the index."""
        return self.num_chunks * self.chunk_bytes + self.num_entries * self.entry_bytes


@dataclass(frozen=True)
class PrunedShape:
    """Pruned rows of a run.

    Args:
        settings: of pruning.
        dim: values of a row.
        optimizer: of rows.
        dtype: of values and state.
        first_rows: different rows that come before columns are chosen, at most.
    """

    settings: PruneSettings
    dim: int
    optimizer: RowOptimizerRule
    dtype: str
    first_rows: int

    def held(self, num_rows: int) -> Held:
        """What is held when so many different rows have come: the most of it at any time."""
        kept = self.settings.num_columns(self.dim)
        later = self._held(num_rows, kept or self.dim)
        if not kept:
            return later
        return max(later, self._held(min(num_rows, self.first_rows), self.dim), key=lambda one: one.bytes)

    def check_batch(self, num_rows: int) -> None:
        """Refuse a budget that has no chunk for each row of a batch."""
        check_batch(self.settings, self.settings.budget, self._sizes(self.dim), num_rows)

    def _sizes(self, columns: int) -> Sizes:
        return part_sizes(columns, self.dim, self.settings, self.optimizer, self.dtype)

    def _held(self, num_rows: int, columns: int) -> Held:
        sizes, chunks = self._sizes(columns), self.settings.chunks
        room = room_for(self.settings, self.settings.budget, sizes, num_rows)
        values = -(-columns // chunks) * np.dtype(self.dtype).itemsize
        return Held(
            num_chunks=min(room.num_chunks, chunks * num_rows),
            num_entries=min(room.num_entries, num_rows),
            chunk_values=values,
            chunk_bytes=sizes.chunk,
            entry_bytes=sizes.entry,
            chunks_of_row=chunks,
        )


def entries_by_table(held: Held, rows: Mapping[str, int]) -> dict[str, int]:
    """Entries of each table, in proportion to its rows: what training decides is not known before."""
    total = max(sum(rows.values()), 1)
    return {name: -(-held.num_entries * count // total) for name, count in rows.items()}


def chunk_store_bytes(held: Held, num_chunks: int, tables: Mapping[str, int]) -> int:
    """Bytes of a memory of a cluster with so many chunks, which are rows of their own, and their indexes."""
    width = max(held.chunk_bytes, 1)
    arena = RecordArena(width, np.uint8)
    blocks = -(-num_chunks // (1 << arena.shift))
    total = max(sum(tables.values()), 1)
    each = [-(-num_chunks * count // (total * held.chunks_of_row)) for count in tables.values()]
    index = held.chunks_of_row * sum(map(index_bytes, each))
    return blocks * (arena.record_bytes << arena.shift) + index


def map_bytes(held: Held, rows: Mapping[str, int]) -> int:
    """Bytes of the map that says which chunks there are, on every host."""
    entries = entries_by_table(held, rows)
    return held.entry_bytes * held.num_entries + sum(map(index_bytes, entries.values()))


def utility_log_bytes(held: Held, num_rows: int) -> int:
    """Bytes of a worker's account of what was useful, of so many rows since the last pruning."""
    seen = min(num_rows, held.num_entries)
    return round(_GROWING * (_LEDGER_ROW + _LEDGER_CHUNK * held.chunks_of_row) * seen) + index_bytes(seen)
