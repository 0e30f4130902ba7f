"""Queues between the thread that receives a host's data and its planner, on the rank that plans.

A batch arrives in two parts: its ids, from which it is planned, and, once it is assigned to workers, the
dense values and labels of the samples that this host trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rowhaul._threads import Failure, Future, RankQueue
from rowhaul.data.samples import Samples
from rowhaul.planning.rank0_data.messages import Description, with_dense
from rowhaul.schedule import Plan
from rowhaul.transport.base import Bytes

_CLOSED = "training was closed on this rank while it waited for data of rank 0"

Workers = npt.NDArray[np.int32]


def trained_by(workers: Sequence[int], worker: Workers) -> npt.NDArray[np.int64]:
    """Return the samples that some workers train, given the worker of each sample."""
    return np.flatnonzero(np.isin(worker, workers))


class Inbox:
    """The batches of a host, in order.

    Args:
        workers: those on this host.
        failure: of this rank; waits end when it is set.
        plans_for_reader: whether `assignment` is used: this rank plans for rank 0's host.
    """

    def __init__(self, workers: Sequence[int], failure: Failure, *, plans_for_reader: bool) -> None:
        self.workers = tuple(workers)
        self.described: Future[Description] = Future(failure)
        self.ids: RankQueue[Samples | None] = RankQueue(failure, _CLOSED)  # `without_dense`; None at the end
        self.dense: RankQueue[Bytes] = RankQueue(failure, _CLOSED)  # of the same batches, in the same order
        self._assignments: RankQueue[Workers] = RankQueue(failure, _CLOSED)
        self._plans_for_reader = plans_for_reader

    def description(self) -> Description:
        """Wait for the description of the batches."""
        return self.described.wait()

    def batches(self) -> Iterator[Samples]:
        """All batches, for the planner."""
        while (samples := self.ids.get()) is not None:
            yield samples

    def complete(self, samples: Samples, plan: Plan) -> Samples:
        """Add dense values and labels to the samples of a planned batch that are trained here."""
        if self._plans_for_reader:
            self._assignments.put(plan.worker)
        if not self.workers:
            return samples
        payload = self.dense.get()
        places, description = trained_by(self.workers, plan.worker), self.description()
        if len(payload) != description.dense_bytes(len(places)):
            return samples  # plans differ, which all ranks find when they compare them
        return with_dense(samples, places, payload, description)

    def assignment(self) -> Workers:
        """Wait until the next batch is planned; return the worker of each sample."""
        return self._assignments.get()

    def close(self) -> None:
        """End all waits."""
        for items in (self.ids, self.dense, self._assignments):
            items.close()
