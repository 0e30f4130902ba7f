"""Carries out plans on one rank, turn by turn: the only one who changes what caches and homes hold.

Between two iterations rows are where the directory says. While a worker trains iteration t, the mover
sends and receives what may travel early of t+1; it reads rows that rest, steps split rows that rest,
and lets nothing into the cache before training is done: what arrives for the cache waits.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.data.samples import Samples
from rowhaul.runtime.batch_rows import BatchRows, batch_rows
from rowhaul.runtime.due_steps import PhaseSteps
from rowhaul.runtime.phases import (
    FROM_CACHE,
    FROM_HOME,
    TO_CACHE,
    TO_HOME,
    Payloads,
    Phase,
    RankPhases,
    pushed_rows,
)
from rowhaul.runtime.row_locations import RowLocations
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.schedule.plan import Plan
from rowhaul.schedule.sync import SyncMode
from rowhaul.transport.base import Bytes, Links, Transfer

_SENDS_UNDER_WAY = 8  # turns whose sent buffers may still be in use


@dataclass
class Job:
    """One iteration on one rank: its plan, and what it took."""

    plan: Plan
    phases: RankPhases
    samples: Samples | None = None
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)  # (kind, peer) sent
    num_samples: int = 0  # that this rank trains
    rows: list[BatchRows] = field(default_factory=list)  # that this rank trains, by group
    where: RowLocations | None = None  # the rows of the plan on this rank
    measures: npt.NDArray[np.float64] | None = None  # ranks x `runtime.MEASURES`, of earlier iterations
    ready_at: float = 0.0  # when all ranks had agreed on the plan
    slack_seconds: float = 0.0  # how long before it was needed that was


@dataclass(frozen=True)
class TrainedRows:
    """Gradients of rows that a worker did not step itself: by group, place of the table, key."""

    parts: list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[Any]]]


class Mover:
    """What one rank does with plans.

    Args:
        rank: this one.
        links: to all others.
        mode: how rows are synchronised.
        rates: the rows' learning rate in each iteration.
        cache: a worker's rows, or None on a dedicated store.
        home: a store's rows, or None on a worker that stores none.
    """

    def __init__(
        self,
        rank: int,
        links: Links,
        mode: SyncMode,
        rates: Rates,
        cache: RowMemory | None,
        home: RowMemory | None,
    ) -> None:
        self.rank, self.cache, self.home = rank, cache, home
        self._links, self._mode, self._rates = links, mode, rates
        self._bounded = mode.name == "bounded"
        self._arrivals: list[tuple[Payloads, Bytes]] = []
        self._under_way: deque[Transfer] = deque()

    @property
    def links(self) -> Links:
        """To all other ranks; for the move thread alone."""
        return self._links

    def early(self, job: Job) -> None:
        """What may travel beside the training of the iteration before."""
        with _timed(job, "early"):
            self._look_up(job)
            self._phase(job, Phase.EARLY_FIRST)
            self._phase(job, Phase.EARLY_SECOND)

    def late(self, job: Job) -> None:
        """What the iteration waits for; afterwards all its rows are in the cache."""
        with _timed(job, "push"):
            self._look_up(job)  # again only if rows have left since
            self._phase(job, Phase.LATE_FIRST)
        with _timed(job, "pull"):
            self._phase(job, Phase.LATE_SECOND)
        if self.cache is not None:
            self._change_cache(job, self.cache)
            assert job.where is not None
            job.rows = batch_rows(self.cache, job.plan, job.where.cache, self.rank, bounded=self._bounded)

    def finish(self, job: Job, trained: TrainedRows | None) -> None:
        """Take over the gradients that training left, push what is to be pushed at once, and forget rows."""
        if self.cache is not None and trained is not None:
            for number, positions, keys, gradients in trained.parts:
                self.cache.buffer_gradients(
                    number, positions, keys, self.rank, gradients, accumulate=self._bounded
                )
        with _timed(job, "push"):
            self._phase(job, Phase.AFTER)
        if self.cache is not None and not self._mode.caches_rows:
            for part in job.rows:
                moving = part.rows.tables[part.moving], part.rows.keys[part.moving]
                self.cache.remove_of_group(part.number, *moving)
        job.rows, job.where = [], None  # whoever keeps jobs need not keep these
        plan = job.plan
        if plan.num_forgotten and plan.forgotten_tables is not None and plan.forgotten_keys is not None:
            for memory in (self.cache, self.home):
                if memory is not None:
                    memory.forget(plan.forgotten_tables, plan.forgotten_keys)

    def wait_sent(self) -> None:
        """Wait until everything sent has left."""
        while self._under_way:
            self._under_way.popleft().wait_sent()

    def _phase(self, job: Job, phase: Phase) -> None:
        sent, received = job.phases.sent(phase), job.phases.received(phase)
        if not len(sent) and not len(received) and not self._has_steps(job, phase):
            return
        where = job.where
        assert where is not None
        arrived = self._exchange(job, sent, received)
        done = np.zeros(len(received), np.uint8)  # gradients that are stepped at once
        due, later = [], []
        for by_peer, located, kinds in ((False, where.home, TO_HOME), (True, where.cache, TO_CACHE)):
            steps, others = job.phases.steps(phase, by_peer=by_peer).apart()
            if len(steps) and located.memory is not None:
                due.append(PhaseSteps(steps, where, located))
                due[-1].note(received, kinds, arrived, done)
            if len(others) and located.memory is not None:
                later.append((others, located.memory))
        if len(received):
            self._take_in(phase, where, received, arrived, done)
        for some in due:
            some.take(self._rates)
        for others, memory in later:
            memory.step(others, self._rates)
        if self._bounded and self.home is not None and len(received):
            self.home.step(pushed_rows(received), self._rates, job.plan.iteration)

    def _has_steps(self, job: Job, phase: Phase) -> bool:
        return bool(len(job.phases.steps(phase, by_peer=False)) or len(job.phases.steps(phase, by_peer=True)))

    def _exchange(self, job: Job, sent: Payloads, received: Payloads) -> Bytes:
        """Send and receive the messages of a turn; returns what came."""
        out = np.empty(sent.num_bytes, np.uint8)
        if len(sent):
            assert job.where is not None
            job.where.pack(sent, out)
            for memory, kinds in ((self.home, FROM_HOME), (self.cache, FROM_CACHE)):
                if memory is not None and sent.has_others:
                    memory.pack_records(sent, kinds, out, others=True)
            if self.cache is not None and sent.has_gradients:
                self.cache.pack_gradients(sent, FROM_CACHE, out)
            job.num_bytes.update(sent.crossing_bytes)
        return self.swap(sent, received, out)

    def swap(self, sent: Payloads, received: Payloads, out: Bytes) -> Bytes:
        """Send the messages in a buffer, and receive others; returns those."""
        arrived = np.empty(received.num_bytes, np.uint8)
        transfer = self._links.post(
            {peer: arrived[part] for peer, part in received.messages.items() if peer != self.rank},
            {peer: out[part] for peer, part in sent.messages.items() if peer != self.rank},
        )
        if self.rank in sent.messages:
            arrived[received.messages[self.rank]] = out[sent.messages[self.rank]]
        transfer.wait_received()
        self._under_way.append(transfer)
        if len(self._under_way) > _SENDS_UNDER_WAY:
            self._under_way.popleft().wait_sent()
        return arrived

    def _take_in(
        self,
        phase: Phase,
        where: RowLocations,
        received: Payloads,
        arrived: Bytes,
        done: npt.NDArray[np.uint8],
    ) -> None:
        """Put away what came, but for gradients that are done; records for the cache wait."""
        if self.home is not None:
            where.unpack(received, TO_HOME, arrived, to=where.home)
            if received.has_others:
                self.home.unpack_records(received, TO_HOME, arrived, others=True)
        if received.has_gradients:
            for memory, kinds in ((self.home, TO_HOME), (self.cache, TO_CACHE)):
                if memory is not None:
                    memory.unpack_gradients(received, kinds, arrived, done)
        if self.cache is not None and phase is not Phase.AFTER:  # then rows go home, and the plan is over
            self._arrivals.append((received, arrived))

    def _look_up(self, job: Job) -> None:
        if job.where is None:
            job.where = RowLocations(job.plan, job.phases.needed, self.rank, self.cache, self.home)
        job.where.look_up()

    def _change_cache(self, job: Job, cache: RowMemory) -> None:
        """Let evicted rows go, and those in that came or are trained for the first time."""
        plan, where = job.plan, job.where
        assert where is not None
        if len(plan.evicted_keys):
            evicted = plan.evicted_from == self.rank
            cache.remove(plan.evicted_tables[evicted], plan.evicted_keys[evicted])
        where.arrive(self._arrivals)
        self._arrivals.clear()


@contextmanager
def _timed(job: Job, what: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        job.seconds[what] += time.perf_counter() - began
