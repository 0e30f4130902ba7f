"""Where a rank gets its plans from: its own planner, or the planner of its host's leader.

Both look the same to whoever carries plans out. A rank may also read the samples itself, as a user's
own data loader does on every rank; what it read is then not used, but compared with what was planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import numpy as np

from rowhaul._threads import Failure
from rowhaul.data.samples import Samples
from rowhaul.planning.planner import PlannedBatch, Planner, samples_digest
from rowhaul.planning.sharing import PlanClient, PlanServer
from rowhaul.schedule import ControlRecord, Plan, Scheduler

Result = TypeVar("Result")

_NOTHING = Samples(
    (),
    np.zeros(0, np.int64),
    np.zeros((0, 0), np.int32),
    np.zeros((0, 0), np.float32),
    None,
    np.zeros(0, np.int64),
)
NO_SAMPLES = bytes(16)  # the digest where there is no batch any more


class PlanFeed(Protocol):
    """The plans of a rank, in order; used by one thread."""

    @property
    def own_digest(self) -> bytes:
        """The digest of the samples of the latest batch as this rank read them, to be compared."""
        ...

    def next(self) -> PlannedBatch | None:
        """The next plan, once it is there; None after the last batch."""
        ...

    def allow(self, iteration: int) -> None:
        """Let iterations up to and including this one be planned; every rank says so."""
        ...

    def receive(self, record: ControlRecord) -> None:
        """Take in a control record that all ranks agreed on, before its iteration is allowed."""
        ...

    def at_rest(self, work: Callable[[Scheduler], Result]) -> Result | None:
        """Do something with the scheduler between two plans, where it is; elsewhere nothing: None."""
        ...

    def share(self, make: Callable[[Scheduler], Plan]) -> Plan:
        """A plan of no iteration, made from the scheduler at rest; all ranks of the host call this."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class LeaderFeed:
    """Plans made on this rank, and sent to the others of its host.

    Args:
        planner: makes them; ``server`` is its audience.
        server: connected to the other ranks; None where there are none.
        failure: of this rank.
    """

    def __init__(self, planner: Planner, server: PlanServer | None, failure: Failure) -> None:
        self.own_digest = NO_SAMPLES
        self._planner = planner
        self._server = server
        self._failure = failure

    def next(self) -> PlannedBatch | None:
        """The next plan, once it is there; None after the last batch."""
        planned = self._planner.next()
        self.own_digest = NO_SAMPLES if planned is None else planned.samples_digest
        return planned

    def allow(self, iteration: int) -> None:
        """Let iterations up to and including this one be planned."""
        self._planner.allow(iteration)

    def receive(self, record: ControlRecord) -> None:
        """Take in a control record before the next plan is made."""
        self._planner.receive(record)

    def at_rest(self, work: Callable[[Scheduler], Result]) -> Result:
        """Do something with the scheduler between two plans."""
        return self._planner.at_rest(work)

    def share(self, make: Callable[[Scheduler], Plan]) -> Plan:
        """A plan of no iteration, made from the scheduler at rest, for all ranks of the host."""

        def make_and_send(scheduler: Scheduler) -> Plan:
            plan = make(scheduler)
            if self._server is not None:
                self._server.send(PlannedBatch(plan, _NOTHING, NO_SAMPLES, NO_SAMPLES, 0.0, 0.0))
            return plan

        return self._planner.at_rest(make_and_send)

    def close(self) -> None:
        """End the planner; the other ranks of the host are told why, if this one has failed."""
        self._planner.close()
        if self._server is not None:
            if self._failure.error is not None:
                self._server.fail(self._failure.error)
            self._server.close()


class FollowerFeed:
    """Plans made by the leader of the host, who also hears what is allowed and what was decided.

    Args:
        client: connected to the leader.
        own_samples: the batches as this rank reads them itself, if it does.
    """

    def __init__(self, client: PlanClient, own_samples: Iterable[Samples] | None = None) -> None:
        self.own_digest = NO_SAMPLES
        self._client = client
        self._own_samples = None if own_samples is None else iter(own_samples)

    def next(self) -> PlannedBatch | None:
        """The next plan, once it is there; None after the last batch."""
        planned = self._client.next()
        if self._own_samples is not None:
            own = next(self._own_samples, None)
            self.own_digest = NO_SAMPLES if own is None else samples_digest(own)
        else:
            self.own_digest = NO_SAMPLES if planned is None else planned.samples_digest
        return planned

    def allow(self, iteration: int) -> None:
        """Nothing: the leader allows its planner the same."""

    def receive(self, record: ControlRecord) -> None:
        """Nothing: the leader's planner has it, and plans say from when it is in force."""

    def at_rest(self, work: Callable[[Scheduler], Result]) -> None:
        """Nothing: the scheduler is the leader's."""

    def share(self, make: Callable[[Scheduler], Plan]) -> Plan:
        """The plan that the leader makes."""
        planned = self._client.next_special()
        assert planned is not None
        return planned.plan

    def close(self) -> None:
        """Close the connection to the leader."""
        self._client.close()
