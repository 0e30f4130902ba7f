"""What rows within a budget take: what the budget buys, whatever ids come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rowhaul._quantities import bytes_text
from rowhaul.budget.maps import record_bytes
from rowhaul.budget.room import Room, room_for
from rowhaul.budget.settings import BudgetSettings
from rowhaul.store.footprint import index_bytes, records_bytes
from rowhaul.store.row_parts import RowEstimate, RowShape


@dataclass(frozen=True)
class SlotEstimate(RowEstimate):
    """Bytes of slots and shared rows; a record is a row. By table in proportion to its ids."""

    rows: dict[str, int]  # different ids that come, by table
    room: Room
    settings: BudgetSettings
    record_values: int
    records_per_row: int = 1

    @classmethod
    def of(
        cls,
        shape: RowShape,
        rows: Mapping[str, int],
        ids_per_batch: float,
        settings: BudgetSettings,
        record_values: int,
    ) -> SlotEstimate:
        """Return what a budget buys; ``record_values`` are the bytes of a row's values."""
        size = record_bytes(shape.dim, shape.optimizer, shape.dtype, settings.row_dtype)
        room = room_for(settings, settings.bytes, size, len(rows))
        return cls(dict(rows), room, settings, record_values)

    @property
    def record_bytes(self) -> int:  # type: ignore[override]  # derived; the base stores it
        """Bytes of a row with its state."""
        return self.room.record_bytes

    @property
    def num_records(self) -> int:  # type: ignore[override]  # derived; the base stores it
        """Slots and shared rows."""
        return self.room.num_records

    def _by_table(self, amount: int) -> dict[str, int]:
        total = max(sum(self.rows.values()), 1)
        return {name: round(amount * count / total) for name, count in self.rows.items()}

    def tables(self) -> dict[str, tuple[int, int, int]]:
        """Bytes of values, state, and the map by table."""
        records, found = self._by_table(self.num_records), self._by_table(self.room.map_bytes)
        state = self.record_bytes - self.record_values
        return {
            name: (count * self.record_values, count * state, found[name]) for name, count in records.items()
        }

    def stored(self, shards: int | None, groups: Sequence[Sequence[str]]) -> dict[str, int]:
        """Bytes of records and map; on a cluster rows are kept by name, and the map is on each host."""
        if shards is not None:
            return {"rows": self.cached(-(-self.num_records // shards))}
        return {"rows": self.num_records * self.record_bytes, "index": self.room.map_bytes}

    def largest_table(self, shards: int) -> float:
        """Bytes of the largest table's part on a store, as saved."""
        return max(self._by_table(self.num_records).values()) * (self.record_bytes + 8) / shards

    def cached(self, num_records: int) -> int:
        """Bytes of a memory of rows by name, with their indexes."""
        each = self._by_table(num_records).values()
        return records_bytes(num_records, self.record_bytes) + sum(map(index_bytes, each))

    def host(self) -> dict[str, int]:
        """Bytes of the map."""
        return {"slot map": self.room.map_bytes}

    def note(self) -> str:
        """Say how many ids have rows of their own."""
        return (
            f"A budget of {bytes_text(self.settings.bytes)}: {self.room.num_slots:,} ids can have a row of "
            f"their own, all others share {self.room.num_shared:,}; by table in proportion to its ids, since "
            "training decides."
        )
