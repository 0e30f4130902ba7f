"""How many records a card holds within so many bytes, beside what finds and moves them."""

from __future__ import annotations

from dataclasses import dataclass

from rowhaul.device.arena import shift_of
from rowhaul.device.index import NAME_BYTES
from rowhaul.device.victims import MOST_LISTED

_PLACES = 1.37  # of the index, for each record: between two sweeps a fifth of them can be taken
_PLACE_BYTES = 4
# Of each record: its key and table, when it was last used, where it is in host memory; and its part of the
# list of those that may leave.
_NOTE_BYTES = NAME_BYTES + 4 + 4 + 4 * MOST_LISTED
_SPARE_BYTES = 2048  # of the index and of lists
_STAGED_SHARE = 1 / 16  # of all bytes, for each staging buffer in host memory
_STAGED_BYTES = 32 << 20  # at most
_LEAST_STAGED = 16  # records


@dataclass(frozen=True)
class CacheSize:
    """The parts of a cache on a card."""

    num_records: int
    shift: int  # of a chunk of records
    num_places: int  # of the index
    num_staged: int  # records of a staging buffer in host memory

    @classmethod
    def within(cls, num_bytes: int, record_bytes: int) -> CacheSize:
        """Return the largest cache that takes ``num_bytes`` at most; it may have no record at all."""
        staged = int(min(num_bytes * _STAGED_SHARE, _STAGED_BYTES)) // record_bytes
        staged = max(staged, _LEAST_STAGED)
        rest = num_bytes - _SPARE_BYTES
        most = max(int(rest / (record_bytes + _NOTE_BYTES + _PLACES * _PLACE_BYTES)), 0)
        shift = min(shift_of(record_bytes), shift_of(record_bytes, most * record_bytes // 16))
        most = most >> shift << shift
        return cls(most, shift, int(most * _PLACES) + 1, staged)

    @classmethod
    def for_records(cls, num_records: int, record_bytes: int) -> int:
        """Return bytes within which there is room for so many records."""
        num_bytes = int(num_records * (record_bytes + _NOTE_BYTES)) + _SPARE_BYTES
        while cls.within(num_bytes, record_bytes).num_records < num_records:
            num_bytes += max(num_bytes // 32, 1024)
        return num_bytes
