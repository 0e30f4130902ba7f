"""Training on data of rank 0: an error of reading ends it like the end of the data, and is raised everywhere.

A rank that raised it at once would leave the others in the middle of an iteration, with nothing but the
news that they have lost a rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from rowhaul.nn import Batch
from rowhaul.planning.rank0_data.sharing import DataSource
from rowhaul.train.distributed.gathering import raise_first_error
from rowhaul.train.distributed.training import DistributedTraining


class TrainingOnSentData(DistributedTraining):
    """A `DistributedTraining` that tells all ranks why there is no more data."""

    _knows_why = False

    def batches(self, count: int | None = None) -> Iterator[Batch]:
        """This rank's part of each of the next ``count`` global batches, or of all.

        Raises:
            Exception: what rank 0 could not read on for, the same on every rank, once all batches before it
                are trained.
        """
        yield from super().batches(count)
        if not self.finished or self._knows_why:
            return
        self._knows_why = True
        data = self.runtime.feed.data
        raise_first_error(self.runtime, self.iteration, data.error if isinstance(data, DataSource) else None)
