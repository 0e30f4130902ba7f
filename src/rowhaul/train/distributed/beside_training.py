"""One save of a cluster at a time, in a thread of each rank beside training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch.distributed import DistError

from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.rendezvous import Store
from rowhaul.errors import CheckpointError, ClusterError
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.train.save_thread import NICE, Pacer, SaveThread

Write = Callable[[Store, Pacer], None]

_NOTHING, _READY, _FAILED = range(3)  # what rank 0 found when it began


class BesideTraining:
    """Saves of this rank that are written beside training.

    Args:
        cluster: of this rank.
        nice: how much the thread gives way to others.
    """

    def __init__(self, cluster: Cluster, nice: int = NICE) -> None:
        self._cluster = cluster
        self._thread = SaveThread(len(cluster.local_ranks), nice)
        self._store: Store | None = None  # of the thread: a connection serves one

    @property
    def is_busy(self) -> bool:
        """Whether this rank writes."""
        return self._thread.is_busy

    def all_begin(self, training: DistributedTraining, begin: Callable[[], bool]) -> bool:
        """Whether all ranks save now; a collective call. ``begin`` makes room for the checkpoint, on rank 0.

        Raises:
            CheckpointError: rank 0 cannot write, on rank 0 alone: the others train on, as it does.
        """
        if any(self._gathered(training, int(self._thread.is_busy))):
            return False
        if self._store is None:
            self._store = self._cluster.another_store()
        found, trouble = _NOTHING, None
        if self._cluster.rank == 0:
            try:
                found = _READY if begin() else _NOTHING
            except CheckpointError as error:
                found, trouble = _FAILED, error
        found = self._gathered(training, found)[0]
        if trouble is not None:
            raise trouble
        return found == _READY

    def start(self, write: Write, done: Callable[[Exception | None], None]) -> None:
        """Write in the thread; ``done`` gets the error, or None."""

        def run(pacer: Pacer) -> None:
            assert self._store is not None
            pacer.check_with(self._cluster.failure.check)
            try:
                write(self._store, pacer)
            except (ClusterError, DistError, ConnectionError) as error:  # the others may wait for this rank
                self._cluster.failure.set(error)
                raise

        self._thread.start(run, done)

    def finish(self) -> None:
        """Wait for the save that is under way."""
        self._thread.finish()

    def close(self) -> None:
        """End the save that is under way."""
        self._thread.close(30.0 if self._cluster.failure.error is None else 2.0)

    def _gathered(self, training: DistributedTraining, value: int) -> list[int]:
        mine = np.array([value], np.int64).view(np.uint8)
        every = training.runtime.in_control(lambda control: control.all_gather(mine)).wait()
        found: list[int] = np.ascontiguousarray(every).view(np.int64).ravel().tolist()
        return found
