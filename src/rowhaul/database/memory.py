"""Where a database's memory goes."""

from __future__ import annotations

from dataclasses import dataclass

from rowhaul.database.rows import Rows
from rowhaul.database.stepping import Gradients


@dataclass(frozen=True)
class MemoryReport:
    """Bytes by purpose; allocated, whether used or not."""

    num_rows: dict[str, int]  # by table
    record_bytes: int  # chunks of values and optimizer state
    used_record_bytes: int  # of them, in use by rows
    resting_records: int  # deleted, and not yet used again since tickets may know them
    index_bytes: int
    gradient_bytes: int  # pushed, waiting for an update
    snapshot_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.record_bytes + self.index_bytes + self.gradient_bytes + self.snapshot_bytes

    def __str__(self) -> str:
        rows = sum(self.num_rows.values())
        return (
            f"{rows:,} rows: records {self.record_bytes:,} bytes ({self.used_record_bytes:,} used), index "
            f"{self.index_bytes:,}, pushed gradients {self.gradient_bytes:,}, snapshots "
            f"{self.snapshot_bytes:,}; {self.total_bytes:,} in all"
        )


def report(rows: Rows, pushed: list[Gradients]) -> MemoryReport:
    """What rows and gradients take now."""
    return MemoryReport(
        num_rows={spec.name: rows.num_rows(spec.name) for spec in rows.settings.tables},
        record_bytes=sum(group.arena.allocated_bytes for group in rows.groups),
        used_record_bytes=sum(
            int(group.index.num_keys.sum()) * group.arena.record_bytes for group in rows.groups
        ),
        resting_records=rows.leases.num_resting,
        index_bytes=sum(group.index.allocated_bytes for group in rows.groups),
        gradient_bytes=sum(part.gradients.nbytes for part in pushed),
        snapshot_bytes=sum(view.allocated_bytes for view in rows.views if view.is_open),
    )
