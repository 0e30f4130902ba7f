"""What a budget holds: how many ids of each table have a row of their own, and the bytes of it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rowhaul._quantities import bytes_text
from rowhaul.nn.row_source import RowNote

if TYPE_CHECKING:
    from rowhaul.budget.tables import SlotTables


@dataclass(frozen=True)
class TableReport:
    """One table."""

    name: str
    num_own: int  # ids that have a row of their own
    num_shared: int  # rows that all its other ids share


@dataclass(frozen=True)
class BudgetReport:
    """All tables of a collection."""

    tables: tuple[TableReport, ...]
    num_slots: int  # rows of their own that ids can have
    row_bytes: int  # values and state, as allocated
    map_bytes: int

    @property
    def num_own(self) -> int:
        """Ids that have a row of their own."""
        return sum(table.num_own for table in self.tables)

    @property
    def num_shared(self) -> int:
        """Rows that all other ids share."""
        return sum(table.num_shared for table in self.tables)

    @property
    def allocated_bytes(self) -> int:
        """Everything that rows take."""
        return self.row_bytes + self.map_bytes

    def lines(self) -> list[tuple[str, str]]:
        """Describe it to people, in a few lines of (title, text)."""
        most = max(self.tables, key=lambda one: one.num_own)
        return [
            (
                "own rows",
                f"{self.num_own:,} ids have a row of their own (of {self.num_slots:,} there is room for), "
                f"{most.num_own:,} of them in table {most.name!r}; all others share {self.num_shared:,}",
            ),
            (
                "budget",
                f"{bytes_text(self.allocated_bytes)}: rows {bytes_text(self.row_bytes)}, what finds and "
                f"counts them {bytes_text(self.map_bytes)}",
            ),
        ]


def report_on(groups: Sequence[SlotTables]) -> BudgetReport:
    """Describe what the tables of each row size hold now."""
    tables = []
    for group in groups:
        owned = np.bincount(group.map.owners[group.map.taken], minlength=len(group.tables)).tolist()
        counts = zip(group.tables, owned, group.map.shared_sizes.tolist(), strict=True)
        tables += [TableReport(spec.name, own, shared) for spec, own, shared in counts]
    return BudgetReport(
        tables=tuple(tables),
        num_slots=sum(group.map.room.num_slots for group in groups),
        row_bytes=sum(group.arena.allocated_bytes for group in groups),
        map_bytes=sum(group.map.allocated_bytes for group in groups),
    )


def note_of(report: BudgetReport) -> RowNote:
    """What a stop has left, for a log."""
    values = {
        "rows": float(report.num_own),
        "shared": float(report.num_shared),
        "bytes": float(report.allocated_bytes),
        **{f"rows/{table.name}": float(table.num_own) for table in report.tables},
    }
    text = f"budget: {report.num_own:,} of {report.num_slots:,} ids have a row of their own"
    return RowNote("budget", text, values)
