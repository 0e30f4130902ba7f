"""What pruning has left: how many rows of each table hold how many chunks, and the bytes of it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rowhaul._quantities import bytes_text
from rowhaul.nn.row_source import RowNote

if TYPE_CHECKING:
    from rowhaul.pruning.pool.tables import PrunedTables


@dataclass(frozen=True)
class TableReport:
    """One table: ``rows_by_chunks[n]`` of its rows in the index hold ``n`` chunks."""

    name: str
    rows_by_chunks: tuple[int, ...]
    mean_dims: float  # values that a row in the index holds, on average

    @property
    def num_rows(self) -> int:
        """Rows in the index."""
        return sum(self.rows_by_chunks)


@dataclass(frozen=True)
class PruneReport:
    """All tables of a collection."""

    tables: tuple[TableReport, ...]
    num_rows: int  # that there would be without pruning
    num_chunks: int  # held
    most_chunks: int  # that may be held
    value_bytes: int  # of what is held
    unpruned_value_bytes: int  # of what would be held
    pool_bytes: int  # values and state, as allocated
    entry_bytes: int
    index_bytes: int

    @property
    def ratio(self) -> float:
        """The share of values that is not there."""
        return 1 - self.value_bytes / self.unpruned_value_bytes if self.unpruned_value_bytes else 0.0

    @property
    def allocated_bytes(self) -> int:
        """Everything that rows take."""
        return self.pool_bytes + self.entry_bytes + self.index_bytes

    @property
    def rows_by_chunks(self) -> tuple[int, ...]:
        """Rows of all tables by the number of chunks they hold; those without an entry hold none."""
        most = max(len(table.rows_by_chunks) for table in self.tables)
        counts = np.zeros(most, dtype=np.int64)
        for table in self.tables:
            counts[: len(table.rows_by_chunks)] += table.rows_by_chunks
        counts[0] += max(0, self.num_rows - int(counts.sum()))
        return tuple(counts.tolist())

    def lines(self) -> list[tuple[str, str]]:
        """Describe it to people, in a few lines of (title, text)."""
        held = sum(self.rows_by_chunks[1:])
        by_chunks = ", ".join(f"{count:,} with {chunks}" for chunks, count in enumerate(self.rows_by_chunks))
        by_values = sorted(self.tables, key=lambda one: one.mean_dims)
        emptiest, fullest = by_values[0], by_values[-1]
        return [
            (
                "pruned",
                f"{self.ratio:.1%} of the values: {bytes_text(self.value_bytes)} are left of "
                f"{bytes_text(self.unpruned_value_bytes)}; of {self.num_rows:,} rows read so far "
                f"{held:,} hold any",
            ),
            ("rows by chunks", by_chunks),
            (
                "values per row",
                f"from {emptiest.mean_dims:.1f} in {emptiest.name!r} to {fullest.mean_dims:.1f} in "
                f"{fullest.name!r}, over rows in the index",
            ),
        ]


def report_on(groups: Sequence[PrunedTables]) -> PruneReport:
    """Describe what the tables of each row size hold now."""
    tables: list[TableReport] = []
    value_bytes = unpruned = 0
    for group in groups:
        itemsize = group.dtype.itemsize
        for position, spec in enumerate(group.tables):
            by_chunks, by_place = group.chunk_counts(position)
            held = int(by_place @ group.cut.sizes)
            value_bytes += held * itemsize
            num_rows = int(by_chunks.sum())
            tables.append(
                TableReport(spec.name, tuple(by_chunks.tolist()), held / num_rows if num_rows else 0.0)
            )
        unpruned += group.map.num_rows * group.dim * itemsize
    return PruneReport(
        tables=tuple(tables),
        num_rows=sum(group.map.num_rows for group in groups),
        num_chunks=sum(group.map.num_held for group in groups),
        most_chunks=sum(group.map.room.num_chunks for group in groups),
        value_bytes=value_bytes,
        unpruned_value_bytes=unpruned,
        pool_bytes=sum(group.arena.allocated_bytes for group in groups),
        entry_bytes=sum(group.map.entries.arena.allocated_bytes for group in groups),
        index_bytes=sum(group.map.index.allocated_bytes for group in groups),
    )


def note_of(report: PruneReport) -> RowNote:
    """What a pruning has left, for a log."""
    values = {
        "rows": float(report.num_rows),
        "ratio": report.ratio,
        "chunks": float(report.num_chunks),
        "bytes": float(report.allocated_bytes),
        **{f"dims/{table.name}": table.mean_dims for table in report.tables},
    }
    text = f"pruned: {report.num_chunks:,} of {report.most_chunks:,} chunks are held"
    return RowNote("prune", text, values, {"rows_by_chunks": report.rows_by_chunks})
