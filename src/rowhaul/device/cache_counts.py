"""What a card's cache has found, fetched and written back: for the log, and for choosing its size."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rowhaul._quantities import bytes_text


@dataclass
class CacheCounts:
    """Counts since the beginning, or between two of them."""

    num_ids: int = 0
    num_missing: int = 0  # ids whose row was not on the card
    num_fetched: int = 0  # rows
    num_made: int = 0  # rows that nobody had before
    num_written: int = 0  # rows back to host memory
    bytes_to_card: int = 0  # rows, and what is said about them; not the ids of batches
    bytes_from_card: int = 0

    def __add__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __sub__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(self)))

    @property
    def hit_ratio(self) -> float:
        """The share of ids whose row was on the card."""
        return 1 - self.num_missing / self.num_ids if self.num_ids else 1.0

    def by_name(self) -> dict[str, float]:
        """Return the numbers for a log."""
        return {"hit_ratio": self.hit_ratio, **{one.name: getattr(self, one.name) for one in fields(self)}}

    def lines(self) -> list[tuple[str, str]]:
        """Return what to tell people at the end of a run, by title."""
        moved = (
            f"{bytes_text(self.bytes_to_card)} to the card ({self.num_fetched:,} rows), "
            f"{bytes_text(self.bytes_from_card)} back ({self.num_written:,} rows)"
        )
        return [
            ("rows on the card", f"{self.hit_ratio:.1%} of {self.num_ids:,} ids found theirs there"),
            ("over PCIe", moved),
        ]
