"""The plans of a rank whose data comes from rank 0: as iterations are allowed, so their data is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from rowhaul.planning.feed import PlanFeed
from rowhaul.planning.planner import PlannedBatch
from rowhaul.planning.rank0_data.sharing import DataReceiver, DataSource
from rowhaul.schedule import ControlRecord, Plan, Scheduler

Result = TypeVar("Result")


class DataFeed:
    """A feed that has its data sent along.

    Args:
        feed: the plans.
        data: this rank's end of the data.
        first: the first iteration that will be allowed.
    """

    def __init__(self, feed: PlanFeed, data: DataSource | DataReceiver, first: int = 0) -> None:
        self.data = data
        self._feed = feed
        self._served = first  # iterations allowed so far

    @property
    def own_digest(self) -> bytes:
        """The digest of the samples, which every rank has from rank 0."""
        return self._feed.own_digest

    def next(self) -> PlannedBatch | None:
        """The next plan, once it is there; None after the last batch."""
        return self._feed.next()

    def allow(self, iteration: int) -> None:
        """Let iterations up to and including this one be planned, and have their data sent."""
        while self._served <= iteration:
            self._served += 1
            self.data.serve()
        self._feed.allow(iteration)

    def receive(self, record: ControlRecord) -> None:
        """Take in a control record that all ranks agreed on, before its iteration is allowed."""
        self._feed.receive(record)

    def at_rest(self, work: Callable[[Scheduler], Result]) -> Result | None:
        """Do something with the scheduler between two plans, where it is."""
        return self._feed.at_rest(work)

    def share(self, make: Callable[[Scheduler], Plan]) -> Plan:
        """A plan of no iteration, for all ranks of the host."""
        return self._feed.share(make)

    def close(self) -> None:
        """End the plans; the data first, for which a planner may be waiting."""
        self.data.close()
        self._feed.close()


def data_bytes(feed: PlanFeed) -> Mapping[str, int]:
    """The bytes that rank 0 has sent so far, by kind: ids, dense (with labels), evaluation, other.

    Asked on rank 0; empty where every host reads the files, and on other ranks.
    """
    return dict(feed.data.sent) if isinstance(feed, DataFeed) else {}
