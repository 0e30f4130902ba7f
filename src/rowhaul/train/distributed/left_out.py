"""Workers with a share of 0: they leave sums and comparisons, and catch up before they are needed again.

Every rank knows from the plan who takes part in an iteration, so groups change without a message. A worker
that is left out still agrees on plans, sends the rows that it owns when others need them and, co-located,
stays the home of its rows. Its copies of dense weights, optimizer state, buffers and replicated rows fall
behind; rank 0, which never leaves, sends them before the worker trains, evaluates or saves again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from rowhaul.planning.disagreement import ranks_text
from rowhaul.runtime.mover import Job
from rowhaul.runtime.runtime import Runtime
from rowhaul.schedule import HotRows, Topology
from rowhaul.train.distributed.replica_state import ReplicaState
from rowhaul.transport.base import Bytes, Collective

OnNote = Callable[[str], None]


class LeftOut:
    """Keeps track, on each worker, of the workers that are left out.

    Args:
        runtime: of this rank.
        topology: workers and stores.
        state: this worker's copies; None where they cannot be sent: then nobody is ever left out.
        note: called on rank 0 with a line when workers leave or return.
    """

    def __init__(
        self, runtime: Runtime, topology: Topology, state: ReplicaState | None, note: OnNote
    ) -> None:
        self._runtime, self._topology, self._state, self._note = runtime, topology, state, note
        self.summing = tuple(range(topology.num_workers))  # in the current iteration
        self._behind: tuple[int, ...] = ()  # workers whose copies are out of date
        self._bytes = 0  # sent, and not counted yet

    @property
    def is_summing(self) -> bool:
        """Whether this worker takes part in the current iteration."""
        return self._runtime.rank in self.summing

    @property
    def is_behind(self) -> bool:
        """Whether this worker's copies are out of date."""
        return self._runtime.rank in self._behind

    def begin(self, job: Job, hot: HotRows | None) -> None:
        """Apply the changes of this iteration's plan to who takes part in sums."""
        if self._state is None:
            return
        workers = job.plan.summing_workers
        self._runtime.sum_among(workers)
        self._catch_up(tuple(one for one in self._behind if one in workers), hot)
        if workers != self.summing and self._runtime.rank == 0:
            self._report(set(self.summing) - set(workers), set(workers) - set(self.summing), job)
        self.summing = workers
        self._behind = tuple(one for one in range(self._topology.num_workers) if one not in workers)
        job.catch_up_bytes, self._bytes = self._bytes, 0

    def catch_up_all(self, hot: HotRows | None) -> None:
        """Bring all workers up to date, between two segments; every worker calls this."""
        self._catch_up(self._behind, hot)
        self._behind = ()

    def _catch_up(self, workers: tuple[int, ...], hot: HotRows | None) -> None:
        """Send rank 0's copies to these workers."""
        state, rank = self._state, self._runtime.rank
        if state is None or not workers or rank not in (0, *workers):
            return
        if rank == 0:
            packed = state.pack(hot)
            self._bytes += packed.nbytes * len(workers)
            self._runtime.in_dense(lambda group: _send(group, packed), (0, *workers))
        else:
            state.unpack(self._runtime.in_dense(_receive, (0, *workers)).wait(), hot)

    def _report(self, left: set[int], back: set[int], job: Job) -> None:
        since = f"from iteration {job.plan.iteration:,} on"
        if left:
            does, stays = ("it takes", "it stays the home of its rows")
            if len(left) > 1:
                does, stays = ("they take", "they stay the homes of their rows")
            home = f"; co-located, {stays}" if self._topology.colocated else ""
            self._note(
                f"left out {since}: {workers_text(left)}. Without a share {does} no part in sums and "
                f"comparisons{home}"
            )
        if back:
            self._note(
                f"back {since}: {workers_text(back)}, brought up to date with "
                f"{self._bytes:,} bytes of weights, optimizer state and hot rows"
            )


def workers_text(some: Iterable[int]) -> str:
    """Name workers in a sentence: "worker 3" or "workers 3, 4"."""
    return ranks_text(sorted(some)).replace("rank", "worker")


def _send(group: Collective, packed: Bytes) -> None:
    group.broadcast(np.array([len(packed)], np.int64).view(np.uint8))
    group.broadcast(packed)


def _receive(group: Collective) -> Bytes:
    length = np.zeros(1, np.int64)
    group.broadcast(length.view(np.uint8))
    packed = np.empty(length[0], np.uint8)
    group.broadcast(packed)
    return packed
