"""Parts of a rank that may dawdle, wherever a test wants them to, and that tell what they have done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from rowhaul.runtime.at_home.mover import HomeMover
from rowhaul.runtime.mover import Job, Mover, TrainedRows
from rowhaul.runtime.runtime import Runtime
from rowhaul.schedule import IdBatch, Plan, Scheduler, ScheduleSettings
from rowhaul.schedule.phases import Phase
from rowhaul.transport.in_process import InProcessLinks, InProcessTransfer

Delay = Callable[[int, str], None]  # rank, phase
PHASES = ("network", "read", "plan", "control", "turn", "forward", "step", "end")
NETWORK = -1  # the rank of delays in the network, which does not know whose they are


def no_delay(rank: int, phase: str) -> None:
    pass


class CountedLinks:
    """Links that count the bytes they are given to send."""

    def __init__(self, links: InProcessLinks) -> None:
        self._links = links
        self.rank, self.num_ranks = links.rank, links.num_ranks
        self.posted: Counter[tuple[int, int]] = Counter()

    def post(self, receives: Mapping[int, np.ndarray], sends: Mapping[int, np.ndarray]) -> InProcessTransfer:
        for peer, data in sends.items():
            self.posted[self._links.rank, peer] += data.nbytes
        return self._links.post(receives, sends)


class RememberedJobs(Mover):
    """A mover that remembers its jobs, and may dawdle."""

    def __init__(self, rank: int, *arguments: object, delay: Delay) -> None:
        super().__init__(rank, *arguments)
        self.jobs: list[Job] = []
        self._delay = delay

    def finish(self, job: Job, trained: TrainedRows | None) -> None:
        super().finish(job, trained)
        self.jobs.append(job)


class DelayedHomeMover(RememberedJobs, HomeMover):
    """One whose rows stay at home."""

    def early(self, job: Job) -> None:
        self._delay(self.rank, "turn")
        super().early(job)

    def late(self, job: Job) -> None:
        self._delay(self.rank, "turn")
        super().late(job)


class DelayedMover(RememberedJobs):
    """One whose rows move as plans say."""

    def _phase(self, job: Job, phase: Phase) -> None:
        self._delay(self.rank, "turn")
        super()._phase(job, phase)


class DelayedRuntime(Runtime):
    """A runtime whose control thread may dawdle."""

    delay: Delay = staticmethod(no_delay)

    def _agree_on(self, number: int) -> Job | None:
        self.delay(self.rank, "control")
        return super()._agree_on(number)


class DelayedScheduler(Scheduler):
    """A scheduler that may dawdle."""

    def __init__(
        self, settings: ScheduleSettings, batches: Iterator[IdBatch], delay: Callable[[], None]
    ) -> None:
        super().__init__(settings, batches)
        self._delay = delay

    def plan(self) -> Plan:
        self._delay()
        return super().plan()
