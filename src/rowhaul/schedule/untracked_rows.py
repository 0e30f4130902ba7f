"""Rows that stay at home: nothing to track, so that plans only say who trains which sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.batch import IdBatch
from rowhaul.schedule.directory import LocatedBatch
from rowhaul.schedule.plan import NO_MOVES, Plan
from rowhaul.schedule.row_tracker import NO_SLOTS, RowTracker, Slots

_NO_TABLES = np.zeros(0, np.int32)
_NO_KEYS = np.zeros(0, np.int64)


class UntrackedRows(RowTracker):
    """A tracker of no rows: what it says of a batch is the same for all of them."""

    _none: LocatedBatch | None = None  # a batch without rows

    def locate(self, number: int, ids: IdBatch, first: int) -> tuple[LocatedBatch, tuple[Slots, Slots]]:
        """Give slots to the rows of a batch, of which none are tracked."""
        if self._none is None:
            self._none, _ = super().locate(number, ids.without_rows(), first)
        return replace(self._none, number=number, ids=ids), (NO_SLOTS, NO_SLOTS)

    def carry_out(self, batch: LocatedBatch, worker: npt.NDArray[np.int32], *, count_uses: bool) -> Plan:
        """Turn an assignment into a plan."""
        nobody = np.zeros(self._num_workers, np.int64)
        return Plan(
            iteration=batch.number,
            num_workers=self._num_workers,
            worker=worker,
            tables=_NO_TABLES,
            keys=_NO_KEYS,
            trainers=np.zeros(0, np.uint64),
            states=np.zeros(0, np.uint8),
            moves=NO_MOVES,
            lookups=nobody,
            hits=nobody,
            all_reduce_rows=0,
            all_reduce_bytes=0,
            evicted_from=np.zeros(0, np.int16),
            evicted_tables=_NO_TABLES,
            evicted_keys=_NO_KEYS,
        )

    def mark_trained(
        self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64], iteration: int
    ) -> None:
        """Ignore rows that were trained before: they are at home, as all are."""
