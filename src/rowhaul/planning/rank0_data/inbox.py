"""Between the lane that brings a host its data and the planner that needs it, on the rank that plans.

A batch comes in two parts: its ids, from which it is planned, and, once it is known who trains what, the
dense values and labels of the samples that this host trains.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rowhaul._threads import Failure
from rowhaul.data.samples import Samples
from rowhaul.errors import ClusterError
from rowhaul.planning.rank0_data.messages import Description, with_dense
from rowhaul.schedule import Plan
from rowhaul.transport.base import Bytes

_PATIENCE = 0.2  # seconds between two looks at whether something has failed

Result = TypeVar("Result")
Workers = npt.NDArray[np.int32]


def trained_by(workers: Sequence[int], worker: Workers) -> npt.NDArray[np.int64]:
    """Which samples some workers train, when it is known who trains each."""
    return np.flatnonzero(np.isin(worker, workers))


class Inbox:
    """The batches of a host, in order, as they come in.

    Args:
        workers: those on this host.
        failure: of this rank; waiting ends when it is set.
        tells_who_trains: whether `assignment` is asked for.
    """

    def __init__(self, workers: Sequence[int], failure: Failure, *, tells_who_trains: bool) -> None:
        self._workers = tuple(workers)
        self._failure = failure
        self._tells_who_trains = tells_who_trains
        self._changed = threading.Condition()  # guards all that follows
        self._description: Description | None = None
        self._ids: deque[Samples] = deque()
        self._dense: deque[Bytes] = deque()
        self._assignments: deque[Workers] = deque()
        self._ended = self._closed = False

    @property
    def trains(self) -> bool:
        """Whether samples are trained on this host at all."""
        return len(self._workers) > 0

    # The lane's side.

    def describe(self, description: Description) -> None:
        """Say what the batches will be like."""
        with self._changed:
            self._description = description
            self._changed.notify_all()

    def add(self, samples: Samples) -> None:
        """Add a batch, of which only the ids are known."""
        with self._changed:
            self._ids.append(samples)
            self._changed.notify_all()

    def end(self) -> None:
        """There are no more batches."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def add_dense(self, payload: Bytes) -> None:
        """Add the dense values and labels of the batch after the one they were added for before."""
        with self._changed:
            self._dense.append(payload)
            self._changed.notify_all()

    def assignment(self) -> Workers:
        """Who trains the samples of the next batch, once it is planned."""
        return self._wait_for(lambda: bool(self._assignments), self._assignments.popleft)

    # The planner's side.

    def description(self) -> Description:
        """What the batches will be like."""

        def take() -> Description:
            assert self._description is not None
            return self._description

        return self._wait_for(lambda: self._description is not None, take)

    def batches(self) -> Iterator[Samples]:
        """All batches."""
        while (samples := self._wait_for(lambda: bool(self._ids) or self._ended, self._next)) is not None:
            yield samples

    def complete(self, samples: Samples, plan: Plan) -> Samples:
        """The batch that is planned, with dense values and labels where they are trained here."""
        if self._tells_who_trains:
            with self._changed:
                self._assignments.append(plan.worker)
                self._changed.notify_all()
        if not self.trains:
            return samples
        payload = self._wait_for(lambda: bool(self._dense), self._dense.popleft)
        places, description = trained_by(self._workers, plan.worker), self.description()
        if len(payload) != description.dense_bytes(len(places)):
            return samples  # ranks plan differently, as all of them find when they compare plans
        return with_dense(samples, places, payload, description)

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _next(self) -> Samples | None:
        return self._ids.popleft() if self._ids else None

    def _wait_for(self, has_come: Callable[[], bool], take: Callable[[], Result]) -> Result:
        with self._changed:
            while not has_come():
                self._failure.check()
                if self._closed:
                    raise ClusterError("training was closed on this rank while it waited for data of rank 0")
                self._changed.wait(_PATIENCE)
            return take()
