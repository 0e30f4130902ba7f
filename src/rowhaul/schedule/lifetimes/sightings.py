"""Tables that admit rows after some sightings and forget none: counts of rows that wait, a filter of others.

The counts are exact. Admitted rows are remembered in two to four bytes each, by a filter that may take a
row for admitted that is not (about one in a hundred): it is then trained from its first sighting on. The
filter depends on the ids alone, so that all ranks, and one process, take the same rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.schedule.arrays import Arrays, Saved, named
from rowhaul.schedule.directory.row_index import RowIndex, index_delete, index_find, index_set, index_value
from rowhaul.schedule.directory.seen import SeenRows
from rowhaul.schedule.lifetimes.policy import Status


class Sightings:
    """Counts rows until they have ``admit_after`` sightings, one number a table."""

    def __init__(self, admit_after: npt.NDArray[np.int64]) -> None:
        self._admit_after = admit_after
        self._counts = RowIndex()
        self._num_waiting = 0
        self._admitted = SeenRows()

    @property
    def memory_bytes(self) -> int:
        """Bytes that counts and filter take."""
        return self._counts.places.nbytes + self._admitted.memory_bytes

    def see(
        self,
        tables: npt.NDArray[np.int32],
        keys: npt.NDArray[np.int64],
        occurrences: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.uint8]:
        """Count the sightings of a batch; the `Status` of each row."""
        status = np.full(len(keys), Status.KNOWN, np.uint8)
        new = np.flatnonzero(~self._admitted.contains(tables, keys))
        if len(new):
            self._counts.reserve(self._num_waiting + len(new))
            admitted, self._num_waiting = count_sightings(
                self._counts.places, tables[new], keys[new], occurrences[new], self._admit_after,
                self._num_waiting,
            )  # fmt: skip
            status[new] = np.where(admitted, Status.ADMITTED, Status.WAITING)
            self._admitted.add(tables[new[admitted]], keys[new[admitted]])
        return status

    def knows(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether rows are admitted."""
        return self._admitted.contains(tables, keys)

    def know(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        """Take rows for admitted."""
        self._num_waiting -= forget_counts(self._counts.places, tables, keys)
        self._admitted.add(tables, keys)

    def set_counts(
        self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> None:
        """Count on from these sightings of rows that wait; nothing may have been counted yet."""
        self._counts.reserve(len(keys))
        self._counts.add(tables, keys, np.minimum(counts, self._admit_after[tables] - 1))
        self._num_waiting = len(keys)

    def waiting(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The rows that wait, by (table, key), and how often each was seen."""
        return self._counts.items()

    def export(self) -> Arrays:
        """The filter as plain arrays."""
        return named("admitted", self._admitted.export())

    def restore(self, saved: Saved) -> None:
        """Remember the rows that were admitted where `export` was called."""
        self._admitted.restore(saved.part("admitted"))


@kernel
def count_sightings(places, tables, keys, occurrences, admit_after, num_rows):
    """Add up sightings row by row; admitted rows leave the map."""
    admitted = np.zeros(len(keys), np.bool_)
    for r in range(len(keys)):
        place = index_find(places, tables[r], keys[r])
        known = places[place, 1] != 0
        count = occurrences[r] + (index_value(places[place, 1]) if known else 0)
        if count >= admit_after[tables[r]]:
            admitted[r] = True
            if known:
                index_delete(places, place)
                num_rows -= 1
        else:
            index_set(places, place, tables[r], keys[r], count)
            num_rows += not known
    return admitted, num_rows


@kernel
def forget_counts(places, tables, keys):
    """Stop counting rows; returns how many were counted."""
    num_counted = 0
    for r in range(len(keys)):
        place = index_find(places, tables[r], keys[r])
        if places[place, 1] != 0:
            index_delete(places, place)
            num_counted += 1
    return num_counted
