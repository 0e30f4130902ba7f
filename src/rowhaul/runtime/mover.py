"""Carries out plans on one rank, phase by phase; nothing else changes what caches and homes hold.

Between two iterations rows are where the directory says. While a worker trains iteration t, the mover runs
the early phases of t+1. They read and step only rows that t does not train; records for the cache are kept
aside until training is done.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul._activity import Activity, doing
from rowhaul.data.samples import Samples
from rowhaul.nn import Batch
from rowhaul.runtime.batch_rows import BatchRows, batch_rows
from rowhaul.runtime.phase_gradients import pack_payloads, unpack_payloads
from rowhaul.runtime.phases import Payloads, RankPhases, steps_on_arrival
from rowhaul.runtime.row_changes import RowChanges
from rowhaul.runtime.row_locations import RowLocations
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.schedule.phases import Phase
from rowhaul.schedule.plan import Plan
from rowhaul.schedule.sync import SyncMode
from rowhaul.transport.base import Bytes, Links, Transfer

_MOST_PENDING_SENDS = 8  # phases whose send buffers may still be in use


@dataclass
class Job:
    """One iteration on one rank: its plan, and its measurements."""

    plan: Plan
    phases: RankPhases | None  # None: nothing moves
    samples: Samples | None = None
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)  # (kind, peer) sent
    counts: Mapping[str, int] = field(default_factory=dict)  # of rows that no plan counts
    num_samples: int = 0  # trained on this rank
    catch_up_bytes: int = 0  # sent by rank 0 before it, to workers that were left out
    batch: Batch | None = None  # trained on this rank, where rows are looked up before
    rows: Sequence[BatchRows] = ()  # trained on this rank, by group
    where: RowLocations | None = None  # on this rank
    measures: npt.NDArray[np.float64] | None = None  # ranks x `runtime.MEASURES`, of earlier iterations
    ready_at: float = 0.0  # when all ranks had agreed on the plan
    slack_seconds: float = 0.0  # from then until the plan was needed


TrainedRows = list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[Any]]]
"""Gradients of rows that a worker did not step itself: group, positions of tables, keys, gradients."""


class Mover:
    """Carries out plans.

    Args:
        rank: this rank.
        links: to all other ranks; for the moves thread alone.
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
        self.rank, self.links, self.cache, self.home = rank, links, cache, home
        self._mode, self._rates = mode, rates
        self._bounded = mode.name == "bounded"
        self.changes: RowChanges | None = None  # where somebody wants to know them
        # Called after every phase with something to do, with its iteration and `time.monotonic` at its start.
        self.on_phase: Callable[[int, Phase, float], None] = lambda iteration, phase, began: None
        self._arrivals: list[tuple[Payloads, Bytes]] = []
        self._pending_sends: deque[Transfer] = deque()

    def phases_of(self, plan: Plan, *, early: bool) -> RankPhases | None:
        """Work out what this rank does in each phase of a plan, in whatever thread."""
        return RankPhases(plan, self.rank, early=early)

    def early(self, job: Job) -> None:
        """Run the phases that overlap with training the iteration before."""
        with timed(job, "early"):
            self._look_up(job)
            self._phase(job, Phase.EARLY_FIRST)
            self._phase(job, Phase.EARLY_SECOND)

    def late(self, job: Job) -> None:
        """Run the phases that the iteration waits for; afterwards all its rows are in the cache."""
        with timed(job, "push"):
            self._look_up(job)  # again only if rows were removed since
            self._phase(job, Phase.LATE_FIRST)
        with timed(job, "pull"):
            self._phase(job, Phase.LATE_SECOND)
        if self.cache is not None:
            assert job.where is not None
            self._change_cache(job.plan, job.where, self.cache)
            job.rows = batch_rows(job.where.cache, bounded=self._bounded)

    def finish(self, job: Job, trained: TrainedRows | None) -> None:
        """Buffer the gradients of training, run the phase after it, and remove rows that are not kept."""
        if self.cache is not None and trained is not None:
            for number, positions, keys, gradients in trained:
                self.cache.buffer_gradients(
                    number, positions, keys, self.rank, gradients, job.plan.iteration,
                    accumulate=self._bounded,
                )  # fmt: skip
        with timed(job, "push"):
            self._phase(job, Phase.AFTER)
        if self.cache is not None and not self._mode.caches_rows:
            for part in job.rows:
                moving = part.rows.tables[part.moving], part.rows.keys[part.moving]
                self.cache.remove_of_group(part.number, *moving)
        job.rows, job.where = (), None  # free them, as the job is kept for its measurements
        plan = job.plan
        if self.changes is not None:
            self.changes.note(plan)
        if plan.num_forgotten and plan.forgotten_tables is not None and plan.forgotten_keys is not None:
            for memory in (self.cache, self.home):
                if memory is not None:
                    memory.forget(plan.forgotten_tables, plan.forgotten_keys)

    def wait_sent(self) -> None:
        """Wait until all sends have completed."""
        with doing(Activity.AWAITING_ROWS):
            while self._pending_sends:
                self._pending_sends.popleft().wait_sent()

    def _phase(self, job: Job, phase: Phase) -> None:
        """Send and receive the messages of a phase, then store and step what has arrived."""
        phases, where = job.phases, job.where
        assert phases is not None
        assert where is not None
        sent, received = phases.sent(phase), phases.received(phase)
        home_steps, peer_steps = phases.steps(phase, by_peer=False), phases.steps(phase, by_peer=True)
        if not len(sent) and not len(received) and not len(home_steps) and not len(peer_steps):
            return
        began = time.monotonic()
        arrived = self.swap(sent, received, pack_payloads(where, sent))
        job.num_bytes.update(sent.crossing_bytes)
        if self._bounded and not len(home_steps):
            home_steps = steps_on_arrival(received, job.plan.iteration)
        unpack_payloads(where, received, arrived, home_steps, peer_steps, self._rates)
        if self.cache is not None and len(received) and phase is not Phase.AFTER:  # then rows only go home
            self._arrivals.append((received, arrived))
        self.on_phase(job.plan.iteration, phase, began)

    def swap(self, sent: Payloads, received: Payloads, out: Bytes) -> Bytes:
        """Send the messages in a buffer; return the buffer of those received."""
        memory = self.cache or self.home
        assert memory is not None
        arrived = memory.message_buffer(received.num_bytes)
        transfer = self.links.post(
            {peer: arrived[part] for peer, part in received.messages.items() if peer != self.rank},
            {peer: out[part] for peer, part in sent.messages.items() if peer != self.rank},
        )
        if self.rank in sent.messages:
            arrived[received.messages[self.rank]] = out[sent.messages[self.rank]]
        with doing(Activity.AWAITING_ROWS):
            transfer.wait_received()
            self._pending_sends.append(transfer)
            if len(self._pending_sends) > _MOST_PENDING_SENDS:
                self._pending_sends.popleft().wait_sent()
        return arrived

    def _look_up(self, job: Job) -> None:
        if job.where is None:
            assert job.phases is not None
            job.where = RowLocations(job.phases, self.cache, self.home)
        job.where.look_up()

    def _change_cache(self, plan: Plan, where: RowLocations, cache: RowMemory) -> None:
        """Drop evicted rows, then insert arrivals."""
        if len(plan.evicted_keys):
            evicted = plan.evicted_from == self.rank
            cache.remove(plan.evicted_tables[evicted], plan.evicted_keys[evicted])
        where.insert_arrivals(self._arrivals)
        self._arrivals.clear()


@contextmanager
def timed(job: Job, what: str) -> Iterator[None]:
    """Add the time of what is done inside to the job's measurements."""
    began = time.perf_counter()
    try:
        yield
    finally:
        job.seconds[what] += time.perf_counter() - began
