"""`hot_rows: auto`: chooses the rows that every worker holds, and chooses again when the data drifts.

Before training all ranks measure the time of moves and sums. Rank 0 then reads the first batches, and the
model (`rowhaul.simulate.hot`) predicts the number of rows with the shortest iterations. This is repeated once
compute is measured, and at every checkpoint with the latest batches. The model's favourites are then tried in
training (`trial`), later only if the predicted gain is large enough, and the quickest set stays. All ranks
receive the rows, and whose turn it is, never a measured time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from rowhaul._activity import Activity, doing
from rowhaul._cores import usable_cores
from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.waiting import within
from rowhaul.data.stream import SampleStream
from rowhaul.nn import TableCollection
from rowhaul.runtime.layout import TableLayout
from rowhaul.runtime.mover import Job
from rowhaul.schedule import HotRows, IdBatch, ScheduleSettings
from rowhaul.schedule.arrays import Arrays
from rowhaul.schedule.settings import NO_ROWS
from rowhaul.simulate.clock import TimeModel
from rowhaul.simulate.hot import Beginning, HotModel, Prediction
from rowhaul.train.distributed.tables import ids_of
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.tuning.hot_set.broadcast import broadcast_number, broadcast_rows, broadcast_sets, state_for_first
from rowhaul.tuning.hot_set.costs import calibrated, processors
from rowhaul.tuning.hot_set.trial import SKIPPED, TURN, HotTrial, different, same_rows, worth_trying
from rowhaul.tuning.hot_set.watch import Watch
from rowhaul.tuning.move_costs import measure_collectives
from rowhaul.tuning.shares import MeasuredLinks

FIRST_REVIEW = 25  # iterations until compute is known, and the first choice is reviewed
OBSERVED = 60  # latest iterations whose times count
LEAST_GAIN = 0.03  # predicted part of an iteration for which other rows are tried
SEARCH_SECONDS = 10.0  # of rank 0 for a choice, about
PREDICTIONS = 14  # of a choice, about
LEAST_SCHEDULED = 20  # batches of every prediction
WARM_UP = 2 / 3  # of these fill caches: fewer rows move while most are new
COMING = 40  # most batches scheduled during training, when caches are filled
SETTLING = 1 / 4  # of these: after an exchange rows move that will not move again
CACHE_SHARE = 0.5  # most replicated rows, as a part of the cache's capacity
_WAITING_SECONDS = 24 * 3600.0  # for rank 0 to decide; the heartbeat detects lost ranks

Report = Callable[[str], None]
Choice = TypeVar("Choice")


class HotSetController:
    """Chooses the replicated rows of a run; every rank has one and makes the same calls.

    Args:
        cluster: all ranks.
        stream: the data, which rank 0 reads.
        collection: whose rows are replicated.
        layout: of its tables.
        profile: the number of batches to count for a choice.
        dense_bytes: of the gradients that are summed in every iteration anyway.
        links: as measured; None: measured here.
        first: the first iteration of training.
    """

    def __init__(
        self,
        cluster: Cluster,
        stream: SampleStream,
        collection: TableCollection,
        layout: TableLayout,
        *,
        profile: int,
        dense_bytes: int,
        links: MeasuredLinks | None = None,
        first: int = 0,
    ) -> None:
        # The iteration after which `review` must be called next.
        self.due: int | None = first + FIRST_REVIEW
        # Whether another trial is running, which would disturb the times of one of hot rows. Rank 0's answer
        # counts; None on all ranks: there are no others.
        self.is_disturbed: Callable[[], bool] | None = None
        self._trial: HotTrial | None = None
        self._was_tried = False
        self._reports: list[str] = []
        self.report: Report = self._reports.append
        self._cluster, self._stream, self._collection = cluster, stream, collection
        self._profile, self._dense_bytes = profile, dense_bytes
        self._links = links or MeasuredLinks.measure(cluster)
        groups = cluster.moves, cluster.dense, cluster.control
        self.times = within(
            _WAITING_SECONDS,
            lambda: measure_collectives(cluster.topology, layout, *groups),
            check=cluster.failure.check,
        )
        self._watch = Watch(cluster.topology.num_workers, OBSERVED)

    def report_to(self, report: Report) -> None:
        """Report decisions to this function, past and future ones."""
        self.report = report
        for text in self._reports:
            report(text)
        self._reports.clear()

    def first(self, settings: ScheduleSettings) -> ScheduleSettings:
        """Add the first rows to replicate to the settings; a collective call before training."""
        links = self._cluster.moves
        mine = self._decided(lambda: self._first_rows(settings)) if links.rank == 0 else None
        # In another thread: a wait in the network for a lost rank cannot be interrupted.
        hot = within(_WAITING_SECONDS, lambda: broadcast_rows(links, mine), check=self._cluster.failure.check)
        return replace(settings, hot=hot if hot is not None and len(hot) else None)

    @property
    def is_trying(self) -> bool:
        """Whether sets are being tried in training."""
        return self._trial is not None

    def observe(self, job: Job) -> None:
        """Record an iteration."""
        self._watch.observe(job)
        if self.is_disturbed is not None and self.is_disturbed():
            self._watch.rested()

    def review(self, training: DistributedTraining, samples: int) -> bool:
        """Review the replicated rows after ``samples`` samples; return whether they changed.

        A collective call, between two segments.
        """
        if self.due is not None and training.iteration < self.due:
            return False  # compute is not known yet, or a set is in the middle of its turn
        self.due = None
        if training.settings.sync_mode.name == "bounded":
            return False
        if self._must_wait(training):
            self.due = training.iteration + FIRST_REVIEW
            return False
        if self._trial is not None:
            self._trial.end_turn(self._watch.seconds_since_rest[SKIPPED - 1 :])
        else:
            state = state_for_first(self._cluster, training)
            mine: list[HotRows] = []
            if self._cluster.rank == 0:
                mine = self._decided(lambda: self._candidates(training.settings, samples, state)) or []
            sets = training.runtime.in_moves(lambda mover: broadcast_sets(mover.links, mine)).wait()
            if not sets:
                return False
            self._trial = HotTrial(sets)
        return self._next_turn(training, self._trial)

    def _must_wait(self, training: DistributedTraining) -> bool:
        """Whether a trial must wait for another one; the same on all ranks."""
        if self._trial is not None or self.is_disturbed is None:
            return False
        mine = int(self.is_disturbed())
        return bool(training.runtime.in_moves(lambda mover: broadcast_number(mover.links, mine)).wait())

    def _next_turn(self, training: DistributedTraining, trial: HotTrial) -> bool:
        """Replicate the set whose turn it is, or the quickest once all were tried."""
        if not trial.is_over:
            self.due = training.iteration + TURN
            return self._exchange(training, trial.in_turn)
        if self._cluster.rank == 0:
            self.report(trial.result())
        mine = trial.quickest()
        best = training.runtime.in_moves(lambda mover: broadcast_number(mover.links, mine)).wait()
        self._trial = None
        return self._exchange(training, trial.sets[best])

    def _exchange(self, training: DistributedTraining, hot: HotRows) -> bool:
        """Replicate these rows; return whether they changed."""
        changed = not same_rows(training.settings.hot, hot)
        if changed:
            typical = self._watch.iteration_seconds
            began = time.perf_counter()
            plan = training.replicate(hot)
            seconds = time.perf_counter() - began
            num_left = len(plan.evicted_keys) // max(plan.num_workers, 1)
            self.report(
                f"hot rows exchanged: {len(plan.keys):,} entered, {num_left:,} left, "
                f"{int(plan.moves.num_bytes.sum()):,} bytes moved in {seconds * 1e3:.0f} ms, "
                f"the time of {seconds / max(typical or seconds, 1e-9):.1f} iterations"
            )
        self._watch.rested()
        return changed

    def _decided(self, choose: Callable[[], Choice]) -> Choice | None:
        try:
            with doing(Activity.PLANNING):
                return choose()
        except Exception as error:  # training is correct with any replicated rows
            self.report(f"hot rows stay as they are: {type(error).__name__}: {error}")
            return None

    def _first_rows(self, settings: ScheduleSettings) -> HotRows:
        stream = self._stream
        began = time.perf_counter()
        end = min(self._profile * stream.batch_size, stream.num_samples)
        model = self.model(settings, self._batches(0, end))
        chosen = model.choose(largest(settings))
        self._report_choice(model, chosen, time.perf_counter() - began)
        return model.rows(chosen.num_rows)

    def _candidates(self, settings: ScheduleSettings, samples: int, state: Arrays | None) -> list[HotRows]:
        """Choose sets to try in training from the latest batches; none if the current one stays."""
        began, size = time.perf_counter(), self._stream.batch_size
        latest = self._batches(max(0, samples - self._profile * size), samples)
        to_come = self._read(samples, samples + COMING * size)
        beginning = None if state is None else Beginning(len(latest), state, settings.hot)
        if beginning is None:
            settings = replace(settings, first_touch=False)  # by now most rows have been trained
        model = self.model(settings, latest + to_come, beginning)
        now_hot = settings.hot or NO_ROWS
        now = model.predict_rows(now_hot)
        chosen = model.choose(largest(settings))
        gain = 1 - chosen.seconds / now.seconds
        sets = different([*(model.rows(one.num_rows) for one in worth_trying(model, chosen)), now_hot])
        if len(sets) == 1 or (self._was_tried and not gain > LEAST_GAIN):
            self.report(
                f"hot rows stay: {now.num_rows:,} are {now.coverage:.0%} of the latest accesses, and "
                f"{chosen.num_rows:,} others would gain {max(gain, 0):.1%}"
            )
            return []
        self._was_tried = True
        self._report_choice(model, chosen, time.perf_counter() - began, now)
        self.report(
            f"hot rows: {', '.join(f'{len(one):,}' for one in sets)} will be tried, "
            f"each for twice {TURN} iterations"
        )
        return sets

    def model(
        self, settings: ScheduleSettings, batches: list[IdBatch], beginning: Beginning | None = None
    ) -> HotModel:
        """Make the performance model from the times known so far; on rank 0.

        Args:
            settings: of the scheduler.
            batches: to count and to schedule.
            beginning: the state before the batches to schedule; None: empty caches.
        """
        cluster, topology = self._cluster, settings.topology
        shared = cluster.interface == cluster.side_interface
        costs = calibrated(self.times, self._links.for_time_model(settings), topology, shared_links=shared)
        share = max(map(len, cluster.hosts)) / cluster.num_ranks / usable_cores()
        busy = processors(self.times, share)
        compute = (0.0,) * topology.num_workers
        if self._watch.num_seen >= FIRST_REVIEW:
            compute, busy = self._watch.compute_seconds(), self._watch.with_the_rest(busy, share)
        model = replace(costs, compute_seconds=compute, dense_bytes=self._dense_bytes)
        scheduled = self._affordable(settings, batches, model, beginning)
        if beginning is not None:
            batches = batches[: beginning.num_batches + scheduled]
        warmup = int(scheduled * (WARM_UP if beginning is None else SETTLING))
        made = HotModel(batches, settings, model, scheduled, warmup, busy, beginning)
        if self._watch.num_seen >= FIRST_REVIEW:
            now = made.predict_rows(settings.hot or NO_ROWS)
            made.overhead = max(0.0, self._watch.iteration_seconds - now.seconds)
        return made

    def _affordable(
        self,
        settings: ScheduleSettings,
        batches: list[IdBatch],
        model: TimeModel,
        beginning: Beginning | None,
    ) -> int:
        """Return the number of batches that a prediction may schedule."""
        trained = 0 if beginning is None else beginning.num_batches
        least = min(LEAST_SCHEDULED, len(batches) - trained)
        trial = HotModel(batches[: trained + least], settings, model, least, 0, beginning=beginning)
        trial.predict_rows(NO_ROWS)  # kernels may compile
        began = time.perf_counter()
        trial.predict_rows(NO_ROWS)
        each = (time.perf_counter() - began) / least
        affordable = int(SEARCH_SECONDS / PREDICTIONS / max(each, 1e-6))
        return min(max(affordable, least), len(batches) - trained)

    def _batches(self, start: int, end: int) -> list[IdBatch]:
        """Read the ids of full batches; a short last one would not be typical."""
        read = self._read(start, end)
        return [one for one in read if len(one) == self._stream.batch_size] or read

    def _read(self, start: int, end: int) -> list[IdBatch]:
        return [ids_of(self._collection, samples) for samples in self._stream.part(start, end)]

    def _report_choice(
        self, model: HotModel, chosen: Prediction, seconds: float, now: Prediction | None = None
    ) -> None:
        without = model.predict(0)
        instead = "" if now is None else f" instead of {now.num_rows:,} ({now.seconds * 1e3:.2f} ms)"
        self.report(
            f"hot rows: {chosen.num_rows:,} on every worker{instead}, {chosen.coverage:.1%} of accesses. "
            f"Predicted {chosen.seconds * 1e3:.2f} ms of moves and sums an iteration, "
            f"{without.seconds / chosen.seconds:.2f} times as fast as without "
            f"({without.seconds * 1e3:.2f} ms): "
            f"{chosen.summed_rows:,.0f} rows summed, {chosen.moved_rows:,.0f} moved instead of "
            f"{without.moved_rows:,.0f}. {len(model.tried)} sizes tried in {seconds:.1f} s"
        )


def largest(settings: ScheduleSettings) -> int:
    """Return the most rows that every worker may hold beside its cache."""
    room = CACHE_SHARE * float(settings.cache.capacities(settings.topology.num_workers).min())
    return int(room if settings.cache.unit == "rows" else room / max(settings.sizes.records))
