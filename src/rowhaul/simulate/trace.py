"""A trace that is read once where it fits in memory, and anew each time where it does not."""

from __future__ import annotations

from collections.abc import Iterable

from rowhaul.schedule import IdBatch
from rowhaul.simulate.measure import Batches

KEPT_BYTES = 1 << 29


class RememberedTrace:
    """Gives the batches of ``read``, from memory if they take no more than ``limit`` bytes.

    A simulation runs over the same trace once for every mechanism and every candidate of shares.
    """

    def __init__(self, read: Batches, limit: int = KEPT_BYTES) -> None:
        self._read = read
        self._kept = self._keep(limit)

    def __call__(self) -> Iterable[IdBatch]:
        """The trace from its beginning."""
        return self._read() if self._kept is None else self._kept

    def _keep(self, limit: int) -> list[IdBatch] | None:
        kept, num_bytes = [], 0
        for batch in self._read():
            num_bytes += batch.offsets.nbytes + batch.tables.nbytes + batch.keys.nbytes
            if num_bytes > limit:
                return None
            kept.append(batch)
        return kept
