"""Rows as they were at one moment, while training goes on.

Nothing is copied when a view begins. A step first saves the records it is about to change, once for each
record and view; an insertion notes which keys are new; a deletion notes where the row was, and the view's
lease keeps the record from being used again. A view thus costs memory for the rows trained since, and a
step the copy of rows not trained before in the view's life.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.database.leases import Lease
from rowhaul.store.arena import RecordArena
from rowhaul.store.index import KeyIndex
from rowhaul.store.keyed import KeyedVectors

Int64s = npt.NDArray[np.int64]
_NEW = 0  # what is noted of a key inserted since; one deleted since has 1 + its record


class View:
    """What has changed since one moment.

    Args:
        num_keys: rows of each table, by group.
        widths: of a record, by group.
        dtype: of records.
        lease: on all records of that moment.
    """

    def __init__(
        self, num_keys: Sequence[Int64s], widths: Sequence[int], dtype: npt.DTypeLike, lease: Lease
    ) -> None:
        self.is_open = True
        self.num_keys = num_keys
        self._lease = lease
        self.changed = [KeyIndex(len(counts)) for counts in num_keys]  # keys inserted or deleted since
        self._saved = [KeyedVectors(1, width, dtype) for width in widths]  # by record number

    def close(self) -> None:
        """Forget everything; takes no lock, so that a garbage collector may call it."""
        self.is_open = False
        self._lease.end()

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the view costs."""
        buffers = sum(
            vectors.arena.allocated_bytes + vectors.index.allocated_bytes for vectors in self._saved
        )
        return buffers + sum(index.allocated_bytes for index in self.changed)

    def note_new(self, group: int, keys: Int64s, starts: Int64s) -> None:
        """Keys that are about to be inserted; of a key's changes only the first matters."""
        self._note(group, keys, starts, np.full(len(keys), _NEW, np.int64))

    def note_deleted(self, group: int, keys: Int64s, starts: Int64s, records: Int64s) -> None:
        """Keys that are about to be deleted, and where their rows are."""
        self._note(group, keys, starts, 1 + records)

    def _note(self, group: int, keys: Int64s, starts: Int64s, codes: Int64s) -> None:
        self.changed[group].find_or_insert(keys, starts, lambda absent: codes[absent], _nothing)

    def save(self, group: int, arena: RecordArena, records: Int64s) -> None:
        """Keep records, which differ, as they are now, unless they were kept before."""
        vectors = self._saved[group]

        def allocate(absent: Int64s) -> Int64s:
            places = vectors.arena.allocate(len(absent))
            vectors.arena.write(places, arena.read(records[absent]))
            return places

        vectors.index.find_or_insert(records, np.array([0, len(records)]), allocate, vectors.arena.release)

    def locate(self, group: int, index: KeyIndex, keys: Int64s, starts: Int64s) -> Int64s:
        """Where the rows were that keys had, -1 for none."""
        # In this order: a key that is found was noted before.
        locations, _ = index.find(keys, starts)
        if self.changed[group].num_keys.any():
            codes, _ = self.changed[group].find(keys, starts)
            locations = np.where(codes < 0, locations, codes - 1)
        return locations

    def saved(self, group: int, records: Int64s) -> tuple[Int64s, npt.NDArray[Any]]:
        """Which of the records have changed since, and what they were."""
        vectors = self._saved[group]
        places, _ = vectors.index.find(records, np.array([0, len(records)]))
        which = np.flatnonzero(places >= 0)
        return which, vectors.arena.read(places[which])


def _nothing(records: Int64s) -> None:
    pass
