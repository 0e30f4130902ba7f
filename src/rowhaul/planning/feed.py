"""Where a rank gets its plans from: its own planner, or the planner of its host's leader.

A rank may also read the samples itself, as a user's own data loader does on every rank; they are then only
compared with those that were planned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from rowhaul._activity import Activity, doing
from rowhaul._threads import Failure
from rowhaul.data.samples import Samples
from rowhaul.planning.planner import NO_DIGEST, PlannedBatch, Planner, samples_digest
from rowhaul.planning.rank0_data.messages import samples_of_size
from rowhaul.planning.rank0_data.sharing import DataEnd
from rowhaul.planning.reading_together import ColumnServer
from rowhaul.planning.sharing import PlanClient, PlanServer
from rowhaul.schedule import ControlRecord, Plan, Scheduler

Result = TypeVar("Result")


class PlanFeed(ABC):
    """The plans of a rank, in order; used by one thread.

    Attributes:
        own_digest: of the samples of the latest batch as this rank read them, to be compared.
        data: this rank's end of the data, if rank 0 reads it for all.
        columns: what this rank decodes for the leader of its host, if they read files together.
    """

    def __init__(self) -> None:
        self.own_digest = NO_DIGEST
        self.data: DataEnd | None = None
        self.columns: ColumnServer | None = None
        self._num_served = 0  # iterations

    def attach_data(self, data: DataEnd, first: int) -> None:
        """Transfer the data of each iteration that is allowed, from ``first`` on."""
        self.data, self._num_served = data, first

    @property
    def data_bytes(self) -> Mapping[str, int]:
        """The bytes that rank 0 has sent so far, by kind: ids, dense (with labels), evaluation, other.

        Empty where every host reads the files, and on other ranks.
        """
        return {} if self.data is None else dict(self.data.sent)

    @abstractmethod
    def next(self) -> PlannedBatch | None:
        """Wait for the next plan; None after the last batch."""

    def allow(self, iteration: int) -> None:
        """Allow planning up to and including this iteration; every rank does."""
        while self.data is not None and self._num_served <= iteration:
            self._num_served += 1
            self.data.serve()

    def receive(self, record: ControlRecord) -> None:
        """Apply a control record that all ranks agreed on, before its iteration is allowed."""
        return  # only where the scheduler is

    def at_rest(self, work: Callable[[Scheduler], Result]) -> Result | None:
        """Call a function with the scheduler between two plans; return None where there is no scheduler."""
        return None

    @abstractmethod
    def share(self, make: Callable[[Scheduler], Plan]) -> Plan:
        """Make a plan of no iteration from the resting scheduler; all ranks of the host call this."""

    def close(self) -> None:
        """End the plans; the data first, as a planner may wait for it."""
        if self.data is not None:
            self.data.close()
        if self.columns is not None:
            self.columns.close()


class LeaderFeed(PlanFeed):
    """Plans made on this rank and sent to the others of its host.

    Args:
        planner: makes them; ``server`` is its audience.
        server: connected to the other ranks; None if there are none.
        failure: of this rank.
    """

    def __init__(self, planner: Planner, server: PlanServer | None, failure: Failure) -> None:
        super().__init__()
        self._planner, self._server, self._failure = planner, server, failure

    def next(self) -> PlannedBatch | None:
        """Wait for the next plan; None after the last batch."""
        planned = self._planner.next()
        self.own_digest = NO_DIGEST if planned is None else planned.samples_digest
        return planned

    def allow(self, iteration: int) -> None:
        """Allow planning up to and including this iteration."""
        super().allow(iteration)
        self._planner.allow(iteration)

    def receive(self, record: ControlRecord) -> None:
        """Apply a control record before the next plan is made."""
        self._planner.receive(record)

    def at_rest(self, work: Callable[[Scheduler], Result]) -> Result:
        """Call a function with the scheduler between two plans."""
        return self._planner.at_rest(work)

    def share(self, make: Callable[[Scheduler], Plan]) -> Plan:
        """Make a plan of no iteration from the resting scheduler, for all ranks of the host."""

        def make_and_send(scheduler: Scheduler) -> Plan:
            plan = make(scheduler)
            if self._server is not None:
                self._server.send_special(
                    PlannedBatch(plan, samples_of_size(0), NO_DIGEST, NO_DIGEST, 0.0, 0.0)
                )
            return plan

        return self._planner.at_rest(make_and_send)

    def close(self) -> None:
        """End the planner; after a failure, send the error to the other ranks of the host."""
        super().close()
        self._planner.close()
        if self._server is not None:
            if self._failure.error is not None:
                self._server.fail(self._failure.error)
            self._server.close()


class FollowerFeed(PlanFeed):
    """Plans made by the leader of the host, which also gets the control records.

    Args:
        client: connected to the leader.
        own_samples: the batches as this rank reads them itself, if it does.
    """

    def __init__(self, client: PlanClient, own_samples: Iterable[Samples] | None = None) -> None:
        super().__init__()
        self._client = client
        self._own_samples = None if own_samples is None else iter(own_samples)

    def next(self) -> PlannedBatch | None:
        """Wait for the next plan; None after the last batch."""
        planned = self._client.next()
        if self._own_samples is not None:
            with doing(Activity.READING):
                own = next(self._own_samples, None)
            self.own_digest = NO_DIGEST if own is None else samples_digest(own)
            if planned is not None and planned.samples_digest == NO_DIGEST != self.own_digest:
                # The leader reads files, which it does not hash for ranks of its host alone.
                same = samples_digest(planned.samples) == self.own_digest
                self.own_digest = NO_DIGEST if same else self.own_digest
        else:
            self.own_digest = NO_DIGEST if planned is None else planned.samples_digest
        return planned

    def share(self, make: Callable[[Scheduler], Plan]) -> Plan:
        """Wait for the plan that the leader makes."""
        return self._client.next_special().plan

    def close(self) -> None:
        """Close the connection to the leader."""
        super().close()
        self._client.close()
