"""`hot_rows: auto`: a model decides how many rows every worker holds, and decides again when the data drifts.

Before training all ranks measure what moves and sums take. Rank 0 then reads the first batches and asks the
model (`rowhaul.simulate.hot`) which number of rows makes the shortest iterations. It asks again once
compute is measured, and at every checkpoint with the batches trained last; other rows are exchanged
where that is predicted to gain enough. All ranks hear of the rows, never of what was measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.waiting import within
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError
from rowhaul.exchange.collectives import measure_collectives
from rowhaul.exchange.mover import Job
from rowhaul.exchange.rows import TableLayout
from rowhaul.exchange.transport import Links
from rowhaul.nn import EmbeddingBagCollection
from rowhaul.schedule import HotRows, IdBatch, ScheduleSettings
from rowhaul.schedule.replication import NO_ROWS
from rowhaul.simulate.hot import HotModel, Prediction
from rowhaul.train.distributed.hot_costs import calibrated, processors
from rowhaul.train.distributed.hot_watch import Watch
from rowhaul.train.distributed.shares import MeasuredLinks
from rowhaul.train.distributed.training import DistributedTraining, tables_of_features

FIRST_REVIEW = 25  # iterations after which compute is known, and the first choice is thought over
OBSERVED = 20  # iterations whose compute times count, the latest ones
LEAST_GAIN = 0.03  # predicted, of an iteration, for which rows are exchanged
SEARCH_SECONDS = 10.0  # that rank 0 takes for a choice, about
PREDICTIONS = 14  # that a choice asks for, about
SCHEDULED = (12, 60)  # batches that a prediction schedules: at least and at most
CACHE_SHARE = 0.5  # replicated rows take at most so much, beside the cache, of what the cache holds
_WAITING_SECONDS = 24 * 3600.0  # for rank 0 to decide; a rank that is gone is noticed by its heartbeat

Told = Callable[[str], None]


class HotKeeper:
    """Chooses the replicated rows of a run; every rank has one, and calls it at the same moments.

    Args:
        cluster: whose ranks decide together.
        stream: the data, which rank 0 reads.
        collection: whose rows they are.
        layout: of its tables.
        profile: batches that are counted for a choice.
        dense_bytes: of the gradients that are summed in every iteration anyway.
        links: measured; None: they are measured here.
    """

    def __init__(
        self,
        cluster: Cluster,
        stream: SampleStream,
        collection: EmbeddingBagCollection,
        layout: TableLayout,
        *,
        profile: int,
        dense_bytes: int,
        links: MeasuredLinks | None = None,
    ) -> None:
        self.told: Told = lambda text: self._unsaid.append(text)
        self._unsaid: list[str] = []
        self._cluster, self._stream, self._collection = cluster, stream, collection
        self._profile, self._dense_bytes = profile, dense_bytes
        self._links = links or MeasuredLinks.measure(cluster)
        self._times = within(
            _WAITING_SECONDS,
            lambda: measure_collectives(
                cluster.topology, layout, cluster.moves, cluster.dense, cluster.control
            ),
            check=cluster.failure.check,
        )
        self._watch = Watch(cluster.topology.num_workers, OBSERVED)

    def speak(self, told: Told) -> None:
        """Tell what was decided, from now on and so far."""
        self.told = told
        for text in self._unsaid:
            told(text)
        self._unsaid.clear()

    def first(self, settings: ScheduleSettings) -> ScheduleSettings:
        """The settings with the rows that are replicated to begin with; a collective call before training."""
        if not all(policy.keeps_all for policy in settings.row_policies):
            raise ConfigError(
                "cluster.hot_rows is auto, but hot rows are admitted at once and never forgotten, and with "
                "policies of tables others are not: what is learned would depend on measured times. Say how "
                "many rows are hot, or leave the policies out"
            )
        mine = None
        if self._cluster.rank == 0:
            mine = self._decided(lambda: self._first_rows(settings))
        links = self._cluster.moves
        # Not in this thread: a rank that waits in the network for one that is gone cannot be interrupted.
        hot = within(_WAITING_SECONDS, lambda: broadcast_rows(links, mine), check=self._cluster.failure.check)
        return replace(settings, hot=hot if hot is not None and len(hot) else None)

    def observe(self, job: Job) -> None:
        """Take note of an iteration."""
        self._watch.observe(job)

    def review(self, training: DistributedTraining, samples: int) -> bool:
        """Think the replicated rows over, ``samples`` having been trained; returns whether they changed.

        A collective call, between two segments.
        """
        if training.settings.sync_mode.name == "bounded":
            return False
        mine = None
        if self._cluster.rank == 0:
            mine = self._decided(lambda: self._better_rows(training.settings, samples))
        hot = training.runtime.in_moves(lambda mover: broadcast_rows(mover.links, mine)).wait()
        changed = hot is not None
        if hot is not None:
            began = time.perf_counter()
            plan = training.replicate(hot)
            seconds = time.perf_counter() - began
            typical = self._watch.iteration_seconds or seconds
            num_left = len(plan.evicted_keys) // max(plan.num_workers, 1)
            self.told(
                f"hot rows exchanged: {len(plan.keys):,} entered, {num_left:,} left, "
                f"{int(plan.moves.num_bytes.sum()):,} bytes moved in {seconds * 1e3:.0f} ms, "
                f"the time of {seconds / max(typical, 1e-9):.1f} iterations"
            )
            self._watch.rested()
        return changed

    def _decided(self, choose: Callable[[], HotRows | None]) -> HotRows | None:
        try:
            return choose()
        except Exception as error:  # whatever rows are replicated, training is right
            self.told(f"hot rows stay as they are: {type(error).__name__}: {error}")
            return None

    def _first_rows(self, settings: ScheduleSettings) -> HotRows:
        stream = self._stream
        began = time.perf_counter()
        end = min(self._profile * stream.batch_size, stream.num_samples)
        model = self.model(settings, self._batches(0, end))
        chosen = model.choose(largest(settings))
        self._tell_choice(model, chosen, time.perf_counter() - began)
        return model.rows(chosen.num_rows)

    def _better_rows(self, settings: ScheduleSettings, samples: int) -> HotRows | None:
        """Rows that are predicted to gain enough on those replicated now, on the latest batches."""
        began = time.perf_counter()
        batches = self._batches(max(0, samples - self._profile * self._stream.batch_size), samples)
        if len(batches) < SCHEDULED[0]:
            return None
        model = self.model(replace(settings, first_touch=False), batches)
        now = model.predict_rows(settings.hot or NO_ROWS)
        chosen = model.choose(largest(settings))
        gain = 1 - chosen.seconds / now.seconds
        if not gain > LEAST_GAIN:
            self.told(
                f"hot rows stay: {now.num_rows:,} are {now.coverage:.0%} of the latest accesses, and "
                f"{chosen.num_rows:,} others would gain {max(gain, 0):.1%}"
            )
            return None
        self._tell_choice(model, chosen, time.perf_counter() - began, now)
        return model.rows(chosen.num_rows)

    def model(self, settings: ScheduleSettings, batches: list[IdBatch]) -> HotModel:
        """The performance model as far as it is known what things take; on rank 0."""
        cluster, topology = self._cluster, settings.topology
        shared = cluster.interface == cluster.side_interface
        costs = calibrated(self._times, self._links.for_time_model(settings), topology, shared_links=shared)
        share = max(map(len, cluster.hosts)) / cluster.num_ranks / len(os.sched_getaffinity(0))
        busy = processors(self._times, share)
        compute = (0.0,) * topology.num_workers
        if self._watch.num_seen >= FIRST_REVIEW:
            compute, busy = self._watch.compute_seconds(), self._watch.with_the_rest(busy, share)
        model = replace(costs, compute_seconds=compute, dense_bytes=self._dense_bytes)
        least, most = SCHEDULED
        trial = HotModel(batches, settings, model, min(least, len(batches)), 0)
        trial.predict(0)  # kernels may compile
        began = time.perf_counter()
        trial.predict_rows(NO_ROWS)
        each = (time.perf_counter() - began) / min(least, len(batches))
        affordable = int(SEARCH_SECONDS / PREDICTIONS / max(each, 1e-6))
        scheduled = min(max(affordable, least), most, len(batches))
        made = HotModel(batches, settings, model, scheduled, scheduled // 3, busy)
        if self._watch.num_seen >= FIRST_REVIEW:
            now = made.predict_rows(settings.hot or NO_ROWS)
            made.overhead = max(0.0, self._watch.iteration_seconds - now.seconds)
        return made

    def _batches(self, start: int, end: int) -> list[IdBatch]:
        """The ids of whole batches from the data; a short last one would not be typical."""
        size = self._stream.batch_size
        read = [
            IdBatch.from_features(
                tables_of_features(self._collection, samples.features), samples.values, samples.lengths
            )
            for samples in self._stream.part(start, end)
        ]
        return [one for one in read if len(one) == size] or read

    def _tell_choice(
        self, model: HotModel, chosen: Prediction, seconds: float, now: Prediction | None = None
    ) -> None:
        without = model.predict(0)
        instead = "" if now is None else f" instead of {now.num_rows:,} ({now.seconds * 1e3:.2f} ms)"
        self.told(
            f"hot rows: {chosen.num_rows:,} on every worker{instead}, {chosen.coverage:.1%} of accesses. "
            f"Predicted {chosen.seconds * 1e3:.2f} ms of moves and sums an iteration, "
            f"{without.seconds / chosen.seconds:.2f} times as fast as without "
            f"({without.seconds * 1e3:.2f} ms): "
            f"{chosen.summed_rows:,.0f} rows summed, {chosen.moved_rows:,.0f} moved instead of "
            f"{without.moved_rows:,.0f}. {len(model.tried)} sizes tried in {seconds:.1f} s"
        )


def largest(settings: ScheduleSettings) -> int:
    """How many rows every worker may hold beside its cache."""
    room = CACHE_SHARE * float(settings.cache.capacities(settings.topology.num_workers).min())
    return int(room if settings.cache.unit == "rows" else room / max(settings.sizes.records))


def broadcast_rows(links: Links, mine: HotRows | None) -> HotRows | None:
    """Rows from rank 0 to all; None, on all ranks, where rank 0 has none to tell of."""
    if links.rank == 0:
        others = range(1, links.num_ranks)
        size = np.array([-1 if mine is None else len(mine)], np.int64)
        parts = [size] if mine is None else [size, mine.tables, mine.keys]
        for part in parts:
            links.post({}, dict.fromkeys(others, np.ascontiguousarray(part).view(np.uint8))).wait_sent()
        return mine
    size = np.empty(1, np.int64)
    links.post({0: size.view(np.uint8)}, {}).wait_received()
    if size[0] < 0:
        return None
    tables, keys = np.empty(size[0], np.int32), np.empty(size[0], np.int64)
    for part in (tables, keys):
        links.post({0: part.view(np.uint8)}, {}).wait_received()
    return HotRows(tables, keys)
