"""How often rows that are not admitted yet were seen: exact counts, so that all ranks agree."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.schedule.directory.index import RowIndex
from rowhaul.schedule.directory.index_kernels import index_delete, index_find, index_set, index_value
from rowhaul.schedule.saved import Arrays, Saved


class Sightings:
    """Counts rows until they reach ``admit_after``; admitted rows are forgotten here."""

    def __init__(self, admit_after: int) -> None:
        self.admit_after = admit_after
        self._counts = RowIndex()
        self._num_rows = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes that the counts take."""
        return self._counts.places.nbytes

    def admit(
        self,
        tables: npt.NDArray[np.int32],
        keys: npt.NDArray[np.int64],
        occurrences: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.bool_]:
        """Count these sightings of rows that are not admitted; true where that admits the row."""
        self._counts.reserve(self._num_rows + len(keys))
        admitted: npt.NDArray[np.bool_]
        admitted, self._num_rows = count_sightings(
            self._counts.places, tables, keys, occurrences, self.admit_after, self._num_rows
        )
        return admitted

    def export(self) -> Arrays:
        """The counts as plain arrays."""
        return dict(zip(("tables", "keys", "counts"), self._counts.items(), strict=True))

    def restore(self, saved: Saved) -> None:
        """Count on from where `export` was called; nothing may have been counted here yet."""
        tables = saved.array("tables", np.int32)
        keys = saved.array("keys", np.int64, len(tables))
        counts = saved.array("counts", np.int64, len(tables), below=self.admit_after)
        self._counts.add(tables, keys, counts)
        self._num_rows = len(keys)


@kernel
def count_sightings(places, tables, keys, occurrences, admit_after, num_rows):
    """Add up sightings row by row; admitted rows leave the map."""
    admitted = np.zeros(len(keys), np.bool_)
    for r in range(len(keys)):
        place = index_find(places, tables[r], keys[r])
        known = places[place, 1] != 0
        count = occurrences[r] + (index_value(places[place, 1]) if known else 0)
        if count >= admit_after:
            admitted[r] = True
            if known:
                index_delete(places, place)
                num_rows -= 1
        else:
            index_set(places, place, tables[r], keys[r], count)
            num_rows += not known
    return admitted, num_rows
