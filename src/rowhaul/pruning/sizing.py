"""What rows in chunks take, by asking the pruner how much room it would make.

How many chunks and entries there may be follows from the settings and from how many different rows come
(`rowhaul.pruning.deciding.room`); a pool is never larger. Before columns are chosen rows have all of them, so
where `prune.dims` or two dimensions are in force there are two such sums, and the larger one counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rowhaul.pruning.deciding.room import Sizes, check_batch, part_sizes, room_for
from rowhaul.pruning.settings import PruneSettings
from rowhaul.store.footprint import index_bytes, records_bytes
from rowhaul.store.row_parts import RowEstimate, RowShape

_GROWING = 1.5  # arrays of a log of utilities grow by half
_LEDGER_ROW, _LEDGER_CHUNK = 4, 4


@dataclass(frozen=True)
class ChunkEstimate(RowEstimate):
    """Bytes of pruned rows; a record is a chunk.

    By table they are in proportion to its rows: which chunks are kept, training decides.
    """

    rows: dict[str, int]  # different ones that come, by table
    shape: RowShape
    settings: PruneSettings
    sizes: Sizes
    record_values: int
    num_records: int
    num_entries: int

    @classmethod
    def of(
        cls, shape: RowShape, rows: Mapping[str, int], ids_per_batch: float, settings: PruneSettings
    ) -> ChunkEstimate:
        """Return what is held at the fullest: in the end, or before columns are chosen."""
        settings.check_dim(next(iter(rows)), shape.dim)
        kept, num_rows = settings.num_columns(shape.dim), sum(rows.values())
        cases = [(num_rows, kept or shape.dim)]
        if kept:
            cases.append((min(num_rows, round(settings.cold_start * ids_per_batch)), shape.dim))
        return max((cls._with(shape, rows, settings, *one) for one in cases), key=lambda one: one.bytes)

    @classmethod
    def _with(
        cls, shape: RowShape, rows: Mapping[str, int], settings: PruneSettings, num_rows: int, columns: int
    ) -> ChunkEstimate:
        chunks = settings.chunks
        sizes = part_sizes(columns, shape.dim, settings, shape.optimizer, shape.dtype)
        room = room_for(settings, settings.budget, sizes, num_rows)
        values = -(-columns // chunks) * np.dtype(shape.dtype).itemsize
        num_chunks = min(room.num_chunks, chunks * num_rows)
        num_entries = min(room.num_entries, num_rows)
        return cls(dict(rows), shape, settings, sizes, values, num_chunks, num_entries)

    @property
    def record_bytes(self) -> int:  # type: ignore[override]  # derived; the base stores it
        """Bytes of a chunk with its state."""
        return self.sizes.chunk

    @property
    def records_per_row(self) -> int:  # type: ignore[override]  # derived; the base stores it
        """Chunks of a row."""
        return self.settings.chunks

    @property
    def bytes(self) -> int:
        """Bytes of chunks and entries, without the index."""
        return self.num_records * self.sizes.chunk + self.num_entries * self.sizes.entry

    @property
    def _entries(self) -> dict[str, int]:
        total = max(sum(self.rows.values()), 1)
        return {name: -(-self.num_entries * count // total) for name, count in self.rows.items()}

    @property
    def _index_bytes(self) -> int:
        return sum(map(index_bytes, self._entries.values()))

    def tables(self) -> dict[str, tuple[int, int, int]]:
        """Bytes of values, state, and index with entries by table."""
        share = self.num_records / max(sum(self.rows.values()), 1)
        state = self.record_bytes - self.record_values
        return {
            name: (
                round(share * self.rows[name] * self.record_values),
                round(share * self.rows[name] * state),
                index_bytes(entries) + entries * self.sizes.entry,
            )
            for name, entries in self._entries.items()
        }

    def stored(self, shards: int | None, groups: Sequence[Sequence[str]]) -> dict[str, int]:
        """Bytes of a pool with its entries; on a cluster chunks are rows, and entries are in the map."""
        if shards is not None:
            return {"rows": self.cached(-(-self.num_records // shards))}
        return {"rows": self.bytes, "index": self._index_bytes}

    def largest_table(self, shards: int) -> float:
        """Bytes of the largest table's part on a store, as saved."""
        return self.bytes * max(self.rows.values(), default=0) / max(sum(self.rows.values()), 1) / shards

    def cached(self, num_records: int) -> int:
        """Bytes of a memory of chunks that are rows of their own, with their indexes."""
        chunks, total = self.settings.chunks, max(sum(self.rows.values()), 1)
        each = [-(-num_records * count // (total * chunks)) for count in self.rows.values()]
        return records_bytes(num_records, self.record_bytes) + chunks * sum(map(index_bytes, each))

    def worker(self, num_ids: float) -> dict[str, int]:
        """Bytes of a worker's log of utilities since the last pruning, where these are of gradients."""
        if self.settings.by_access:
            return {}
        seen = min(round(num_ids * self.settings.period), self.num_entries)
        row = _LEDGER_ROW + _LEDGER_CHUNK * self.settings.chunks
        return {"utilities": round(_GROWING * row * seen) + index_bytes(seen)}

    def host(self) -> dict[str, int]:
        """Bytes of the map that says which chunks are stored."""
        return {"chunk map": self.sizes.entry * self.num_entries + self._index_bytes}

    def check_batch(self, num_rows: int) -> None:
        """Refuse a budget that has no chunk for each row of a batch."""
        shape = self.shape
        sizes = part_sizes(shape.dim, shape.dim, self.settings, shape.optimizer, shape.dtype)
        check_batch(self.settings, self.settings.budget, sizes, num_rows)

    def note(self) -> str:
        """Say how many chunks and rows there are at most."""
        columns = self.settings.num_columns(self.shape.dim)
        fewer = f", with {columns} of {self.shape.dim} columns after the cold start" if columns else ""
        return (
            f"Pruned: at most {self.num_records:,} chunks in {self.num_entries:,} rows, "
            f"{self.settings.chunks} to a row{fewer}; by table in proportion to its rows, "
            "since training decides."
        )
