"""What a budget buys: rows of their own, shared rows, and the counts that decide who has which.

Per row size: a count-min sketch of the ids without a row, a list of the most wanted among them, shared rows,
and for the rest rows of their own, each with a place of 5 bytes that finds it and counts its accesses (of 6,
with more than 256 tables).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rowhaul.budget.settings import BudgetSettings
from rowhaul.errors import ConfigError

BUCKET = 8  # places that an id may take in each of its two buckets
_PLACE_BYTES = 4  # a print and a count of 16 bits; and the table that owns the row
_WANTED_BYTES = 9  # a hash of 64 bits and an estimate; and the table
_TABLE_BYTES = 24  # of a table: its shared rows, how often these are read, and little else
_BYTE_TABLES = 256  # that one byte can tell apart
SKETCH_SHARE = 0.03
WANTED_SHARE = 0.02
SKETCH_ROWS = 2


@dataclass(frozen=True)
class Room:
    """What rows of one size get."""

    num_slots: int  # a multiple of BUCKET
    num_shared: int
    sketch_width: int  # cells of each row of the sketch
    num_wanted: int  # a multiple of BUCKET
    record_bytes: int
    owner_bytes: int = 1  # of what tells tables apart

    @property
    def num_records(self) -> int:
        """Rows of either kind."""
        return self.num_slots + self.num_shared

    @property
    def map_bytes(self) -> int:
        """Bytes of what finds and chooses rows."""
        wanted = self.num_wanted * (_WANTED_BYTES + self.owner_bytes)
        places = self.num_slots * (_PLACE_BYTES + self.owner_bytes)
        return places + wanted + SKETCH_ROWS * self.sketch_width

    @property
    def total_bytes(self) -> int:
        """Bytes of everything."""
        return self.num_records * self.record_bytes + self.map_bytes


def divide(settings: BudgetSettings, columns: Sequence[int], which: int) -> int:
    """Return the bytes for one of several row sizes; ``columns`` are those of all its tables together."""
    return settings.bytes * columns[which] // sum(columns)


def room_for(
    settings: BudgetSettings, num_bytes: int, record_bytes: int, num_tables: int, enough: int = 0
) -> Room:
    """Return what ``num_bytes`` buy for tables of one row size; ``enough`` are bytes that all sizes need."""
    owner = owner_bytes(num_tables)
    width = max(BUCKET, int(num_bytes * SKETCH_SHARE) // SKETCH_ROWS)
    wanted_bytes = _WANTED_BYTES + owner
    num_wanted = max(1, int(num_bytes * WANTED_SHARE) // (wanted_bytes * BUCKET)) * BUCKET
    num_shared = max(num_tables, int(num_bytes * settings.shared) // record_bytes)
    beside = SKETCH_ROWS * width + num_wanted * wanted_bytes + num_shared * record_bytes
    beside += num_tables * _TABLE_BYTES
    num_slots = max(0, num_bytes - beside) // ((record_bytes + _PLACE_BYTES + owner) * BUCKET) * BUCKET
    if num_slots < BUCKET:
        needed = enough or least_bytes(settings, record_bytes, num_tables)
        raise ConfigError(
            f"prune.budget is {settings.bytes:,} bytes, too few for {num_tables} tables with rows of "
            f"{record_bytes} bytes, optimizer state included: each needs a shared row, and {BUCKET} ids one "
            f"of their own; give at least {needed:,} bytes, or make rows smaller"
        )
    return Room(num_slots, num_shared, width, num_wanted, record_bytes, owner)


def owner_bytes(num_tables: int) -> int:
    """Return how many bytes tell tables apart."""
    return 1 if num_tables <= _BYTE_TABLES else 2


def least_bytes(settings: BudgetSettings, record_bytes: int, num_tables: int) -> int:
    """Return bytes that are surely enough for tables of one row size."""
    beside = _PLACE_BYTES + _WANTED_BYTES + 2 * owner_bytes(num_tables)
    fixed = num_tables * (record_bytes + _TABLE_BYTES) + BUCKET * (record_bytes + beside + SKETCH_ROWS)
    return math.ceil(fixed / (1 - settings.shared - SKETCH_SHARE - WANTED_SHARE))
