"""Carries out iterations whose rows stay at home: found ahead, read before training, stepped after it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rowhaul.nn.features import FeatureGroup
from rowhaul.runtime.at_home.exchange import HomeExchange, Visit
from rowhaul.runtime.mover import Job, Mover, TrainedRows, timed
from rowhaul.runtime.own_samples import own_batch
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.schedule import ScheduleSettings
from rowhaul.schedule.phases import Phase
from rowhaul.schedule.plan import Plan
from rowhaul.schedule.topology import Topology
from rowhaul.transport.base import Links


def make_mover(
    settings: ScheduleSettings,
    rank: int,
    links: Links,
    rates: Rates,
    cache: RowMemory | None,
    home: RowMemory | None,
    groups: Sequence[FeatureGroup],
) -> Mover:
    """Make what carries out the iterations of a rank."""
    arguments = rank, links, settings.sync_mode, rates, cache, home
    if settings.sync_mode.plans_rows:
        return Mover(*arguments)
    mover = HomeMover(*arguments)
    mover.read_for(groups, settings.topology)
    return mover


class HomeMover(Mover):
    """Serves the rows of this rank's home, and brings those of its samples.

    The cache stays empty. Rows of the next iteration are found while one is trained, on all ranks; their
    values are read once everything before is stepped.
    """

    def read_for(self, groups: Sequence[FeatureGroup], topology: Topology) -> None:
        """Read rows for these features."""
        assert self.home is not None, "rows stay at home on workers that store them"
        self._exchange = HomeExchange(self.rank, self.links, topology, self.home, groups)
        self._visits: dict[int, Visit] = {}  # by iteration

    def phases_of(self, plan: Plan, *, early: bool) -> None:
        """Return nothing: no row moves by a plan."""

    def early(self, job: Job) -> None:
        """Find the rows that all ranks need for an iteration."""
        assert job.samples is not None
        began = time.monotonic()
        with timed(job, "early"):
            job.batch = own_batch(job.samples, job.plan.worker, self.rank)
            self._visits[job.plan.iteration] = self._linked().ask(job.batch.ids)
        self.on_phase(job.plan.iteration, Phase.EARLY_FIRST, began)

    def late(self, job: Job) -> None:
        """Read the values of these rows."""
        began = time.monotonic()
        with timed(job, "pull"):
            visit = self._visits[job.plan.iteration]
            job.rows, job.counts = self._linked().read(visit), self._exchange.counts(visit)
        self.on_phase(job.plan.iteration, Phase.LATE_SECOND, began)

    def finish(self, job: Job, trained: TrainedRows | None) -> None:
        """Hand gradients over to homes, and step the rows that are stored here."""
        assert trained is not None
        number, began = job.plan.iteration, time.monotonic()
        visit = self._visits.pop(number)
        with timed(job, "push"):
            gradients = {group: part for group, _, _, part in trained}
            self._linked().step(visit, gradients, self._rates(number), number + 1)
        job.rows, job.batch = (), None  # free them, as the job is kept for its measurements
        self.on_phase(number, Phase.AFTER, began)
        if self.changes is not None:
            for tables, served in zip(self._exchange.tables, visit.served, strict=True):
                self.changes.note_stepped(number + 1, tables.tables_of(served), served.keys)

    def _linked(self) -> HomeExchange:
        """The exchange over today's links: they may be measured now and then."""
        self._exchange.links = self.links
        return self._exchange
