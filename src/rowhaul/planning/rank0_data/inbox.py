"""Queues between the thread that receives a host's data and its planner, on the rank that plans.

A batch arrives in two parts: its ids, from which it is planned, and, once it is assigned to workers, the
dense values and labels of the samples that this host trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rowhaul._threads import POLL_SECONDS, Failure, Future
from rowhaul.data.samples import Samples
from rowhaul.errors import ClusterError
from rowhaul.planning.rank0_data.messages import Description, with_dense
from rowhaul.schedule import Plan
from rowhaul.transport.base import Bytes

Item = TypeVar("Item")
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
        self.ids: SimpleQueue[Samples | None] = SimpleQueue()  # `without_dense`; None at the end
        self.dense: SimpleQueue[Bytes] = SimpleQueue()  # of the same batches, in the same order
        self._assignments: SimpleQueue[Workers] = SimpleQueue()
        self._failure = failure
        self._plans_for_reader = plans_for_reader
        self._closed = False

    def description(self) -> Description:
        """Wait for the description of the batches."""
        return self.described.wait()

    def batches(self) -> Iterator[Samples]:
        """All batches, for the planner."""
        while (samples := self._get(self.ids)) is not None:
            yield samples

    def complete(self, samples: Samples, plan: Plan) -> Samples:
        """Add dense values and labels to the samples of a planned batch that are trained here."""
        if self._plans_for_reader:
            self._assignments.put(plan.worker)
        if not self.workers:
            return samples
        payload = self._get(self.dense)
        places, description = trained_by(self.workers, plan.worker), self.description()
        if len(payload) != description.dense_bytes(len(places)):
            return samples  # plans differ, which all ranks find when they compare them
        return with_dense(samples, places, payload, description)

    def assignment(self) -> Workers:
        """Wait until the next batch is planned; return the worker of each sample."""
        return self._get(self._assignments)

    def close(self) -> None:
        """End all waits."""
        self._closed = True

    def _get(self, items: SimpleQueue[Item]) -> Item:
        while True:
            try:
                return items.get(timeout=POLL_SECONDS)
            except Empty:
                self._failure.check()
                if self._closed:
                    raise ClusterError(
                        "training was closed on this rank while it waited for data of rank 0"
                    ) from None
