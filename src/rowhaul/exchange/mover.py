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
from rowhaul.exchange.kernels import rows_of_worker
from rowhaul.exchange.rows import Rates, RowMemory
from rowhaul.exchange.transport import Bytes, Links, Transfer
from rowhaul.exchange.turns import Parcels, Turn, TurnsOfRank, from_home, pushed_rows, to_home
from rowhaul.schedule.directory.states import State
from rowhaul.schedule.plan import Payload, Plan
from rowhaul.schedule.sync import SyncMode

_SENDS_UNDER_WAY = 8  # turns whose sent buffers may still be in use


@dataclass
class Job:
    """One iteration on one rank: its plan, and what it took."""

    plan: Plan
    turns: TurnsOfRank
    samples: Samples | None = None
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)  # (kind, peer) sent
    num_samples: int = 0  # that this rank trains
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
        self._arrivals: list[tuple[Parcels, npt.NDArray[np.bool_], Bytes]] = []
        self._under_way: deque[Transfer] = deque()

    @property
    def links(self) -> Links:
        """To all other ranks; for the move lane alone."""
        return self._links

    def early(self, job: Job) -> None:
        """What may travel beside the training of the iteration before."""
        with _timed(job, "early"):
            self._turn(job, Turn.EARLY_FIRST)
            self._turn(job, Turn.EARLY_SECOND)

    def late(self, job: Job) -> None:
        """What the iteration waits for; afterwards all its rows are in the cache."""
        with _timed(job, "push"):
            self._turn(job, Turn.LATE_FIRST)
        with _timed(job, "pull"):
            self._turn(job, Turn.LATE_SECOND)
        if self.cache is not None:
            self._change_cache(job.plan, self.cache)

    def finish(self, job: Job, trained: TrainedRows | None) -> None:
        """Take over the gradients that training left, and push what is to be pushed at once."""
        if self.cache is not None and trained is not None:
            for number, positions, keys, gradients in trained.parts:
                self.cache.shelve(number, positions, keys, self.rank, gradients, accumulate=self._bounded)
        with _timed(job, "push"):
            self._turn(job, Turn.AFTER)
        if self.cache is not None and not self._mode.caches_rows:
            plan = job.plan
            rows, _ = rows_of_worker(plan.trainers, self.rank)
            kept = np.isin(plan.states[rows], (State.REPLICATED, State.NOT_ADMITTED))
            self.cache.remove(plan.tables[rows[~kept]], plan.keys[rows[~kept]])

    def settle_sends(self) -> None:
        """Wait until everything sent has left."""
        while self._under_way:
            self._under_way.popleft().wait_sent()

    def _turn(self, job: Job, turn: Turn) -> None:
        sent, received = job.turns.sent(turn), job.turns.received(turn)
        if not len(sent) and not len(received) and not self._has_steps(job, turn):
            return
        arrived = self._exchange(job, sent, received)
        if len(received):
            self._take_in(received, arrived)
        for by_peer, memory in ((False, self.home), (True, self.cache)):
            steps = job.turns.steps(turn, by_peer=by_peer)
            if len(steps) and memory is not None:
                memory.step(steps, self._rates)
        if self._bounded and self.home is not None and len(received):
            self.home.step(pushed_rows(received), self._rates, job.plan.iteration)

    def _has_steps(self, job: Job, turn: Turn) -> bool:
        return bool(len(job.turns.steps(turn, by_peer=False)) or len(job.turns.steps(turn, by_peer=True)))

    def _exchange(self, job: Job, sent: Parcels, received: Parcels) -> Bytes:
        """Send and receive the messages of a turn; returns what came."""
        out = np.empty(sent.num_bytes, np.uint8)
        if len(sent):
            stored = from_home(sent)
            if self.home is not None:
                self.home.pack(sent, stored, self.rank, out)
            if self.cache is not None:
                self.cache.pack(sent, ~stored, self.rank, out)
            _count(job, sent, self.rank)
        return self.swap(sent, received, out)

    def swap(self, sent: Parcels, received: Parcels, out: Bytes) -> Bytes:
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

    def _take_in(self, received: Parcels, arrived: Bytes) -> None:
        stored = to_home(received)
        if self.home is not None:
            self.home.unpack(received, stored, arrived)
        if self.cache is not None:
            gradients = ~stored & ((received.payload & int(Payload.GRADIENT)) != 0)
            self.cache.unpack(received, gradients, arrived)
            records = ~stored & ~gradients
            if records.any():
                self._arrivals.append((received, records, arrived))

    def _change_cache(self, plan: Plan, cache: RowMemory) -> None:
        """Let evicted rows go, and in what came and what is trained for the first time."""
        evicted = plan.evicted_from == self.rank
        cache.remove(plan.evicted_tables[evicted], plan.evicted_keys[evicted])
        for received, records, arrived in self._arrivals:
            cache.unpack(received, records, arrived)
        self._arrivals.clear()
        mask = np.uint64(1) << np.uint64(self.rank)
        mine = (plan.trainers & mask) != 0
        fresh = (plan.states == State.FRESH) & mine
        cache.make(plan.tables[fresh], plan.keys[fresh])


def _count(job: Job, sent: Parcels, rank: int) -> None:
    """Add up bytes by kind and peer; what stays on this rank is not counted."""
    ends = np.append(sent.offsets[1:], sent.num_bytes)
    lengths = (ends - sent.offsets).astype(np.float64)
    first = 0
    for peer, part in sent.messages.items():
        last = int(np.searchsorted(sent.offsets, part.stop))
        if peer != rank:
            of_kinds = np.bincount(sent.kind[first:last], lengths[first:last]).tolist()
            job.num_bytes.update({(kind, peer): int(size) for kind, size in enumerate(of_kinds) if size})
        first = last


@contextmanager
def _timed(job: Job, what: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        job.seconds[what] += time.perf_counter() - began
