"""`--shares auto`: chooses the number of samples of each worker by the speed of its link and processor.

Links are measured before training, compute during the first iterations. Rank 0 then simulates shares on the
first batches of the data, beside training. The best of those, equal shares, and equal shares on the best
workers alone are each tried in training, for a few iterations, and the quickest stay. Shares are control
records: in force in the same iteration on all ranks.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rowhaul.cluster.cluster import Cluster
from rowhaul.data.stream import SampleStream
from rowhaul.nn import EmbeddingBagCollection
from rowhaul.runtime.mover import Job
from rowhaul.runtime.runtime import MEASURES
from rowhaul.schedule import IdBatch, ScheduleSettings, Topology
from rowhaul.simulate.clock import TimeModel
from rowhaul.simulate.links import Link, Links
from rowhaul.simulate.results import Outcome
from rowhaul.simulate.run import Simulation
from rowhaul.train.distributed.training import DistributedTraining, ids_of, layout_of
from rowhaul.transport.calibration import LinkMeasurements, measure_links

OBSERVED_ITERATIONS = 10  # whose compute times count
SKIPPED_ITERATIONS = 3  # before them: kernels may compile
TRIED_BATCHES, WARM_UP_BATCHES = 60, 20  # in the simulator
TRIAL_ITERATIONS = 16  # of training, with each candidate
SLOW_STORE = 2.0  # a store is slow if workers are this much faster among themselves


@dataclass(frozen=True)
class MeasuredLinks:
    """The speed and latency of each rank's link, workers first."""

    bytes_per_second: tuple[float, ...]
    latency_seconds: tuple[float, ...]

    @classmethod
    def measure(cls, cluster: Cluster) -> MeasuredLinks:
        """Measure the links of all ranks; a collective call before training."""
        measured = measure_links(cluster.moves, cluster.control)
        others = np.where(np.eye(measured.num_ranks, dtype=bool), np.inf, measured.latency_seconds)
        # A message occupies both of its ends: each gets half of its latency.
        latencies = tuple((others.min(axis=1) / 2).tolist())
        return cls(_own_speeds(measured, cluster.topology), latencies)

    def for_time_model(self, settings: ScheduleSettings) -> Links:
        """Convert to the simulator's links."""
        links = list(map(Link, self.bytes_per_second, self.latency_seconds))
        workers = settings.topology.num_workers
        stores = None if settings.topology.colocated else tuple(links[workers:])
        return Links.make(settings.topology, tuple(links[:workers]), stores)


def _own_speeds(measured: LinkMeasurements, topology: Topology) -> tuple[float, ...]:
    """Estimate the speed of each rank's own link from those of pairs.

    A pair is as fast as the slower of its links. A worker's pairs with stores count, unless workers are much
    faster among themselves: then the store is slow. Otherwise a store is assumed to be as fast as all
    workers together: its speed cannot be measured over slower links.
    """
    workers = topology.num_workers
    if topology.colocated:
        return measured.rank_speeds()
    pairs = measured.both_ways_bytes_per_second
    with_stores = np.median(pairs[:workers, workers:], axis=1)
    among = np.where(np.eye(workers, dtype=bool), 0.0, pairs[:workers, :workers]).max(axis=1)
    held_back = among > SLOW_STORE * with_stores
    speeds = np.where(held_back, among, with_stores)
    store = float(with_stores.max()) if held_back.any() else float(speeds.sum())
    return (*speeds.tolist(), *([store] * topology.num_stores))


class ShareController:
    """Watches the first iterations on rank 0 and decides the shares.

    Args:
        training: the run.
        first_batches: reads the ids of the first global batches of the data.
        links: as measured; None if shares are not chosen.
        report: called with a line about the choice.
    """

    def __init__(
        self,
        training: DistributedTraining,
        first_batches: Callable[[], list[IdBatch]],
        links: MeasuredLinks | None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.decided = False  # the final shares have been posted
        self._training, self._first_batches, self._links = training, first_batches, links
        self._report = report
        self._observed: list[npt.NDArray[np.float64]] = []
        self._num_seen = 0
        self._thread: threading.Thread | None = None
        self._candidates: list[Outcome] = []
        self._trial: _Trial | None = None
        self._dispatcher = str(training.settings.dispatcher)
        self._last = time.perf_counter()

    def observe(self, job: Job) -> None:
        """Record an iteration; after enough of them, find candidates beside training, and try them."""
        if self._links is None or job.measures is None:
            return
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if self._trial is not None:
            self._try(job, seconds)
        elif self._thread is None:
            self._watch(job.measures)
        elif self._candidates:
            self._trial = _Trial(self._candidates)
            self._post(self._trial.candidate)

    def _watch(self, measures: npt.NDArray[np.float64]) -> None:
        self._num_seen += 1
        if self._num_seen > SKIPPED_ITERATIONS:
            self._observed.append(measures[: self._training.settings.topology.num_workers])
        if len(self._observed) >= OBSERVED_ITERATIONS:
            self._thread = threading.Thread(target=self._find, name="rowhaul-shares", daemon=True)
            self._thread.start()

    def _find(self) -> None:
        """Simulate shares and keep the best as candidates."""
        try:
            assert self._links is not None
            seconds, sums = seconds_per_sample(self._observed), sum_seconds(self._observed)
            settings = self._training.settings
            self._candidates = candidates(settings, self._first_batches(), self._links, seconds, sums)
        except Exception as error:  # equal shares are always correct, only slower
            self._report(f"shares stay equal: {error}")

    def _try(self, job: Job, seconds: float) -> None:
        """Time the current candidate, then the next one; in the end use the quickest."""
        trial = self._trial
        assert trial is not None
        shares = np.bincount(job.plan.worker, minlength=job.plan.num_workers)
        if self.decided or not trial.is_timed(shares, seconds):
            return
        trial.place += 1
        if trial.place < len(trial.candidates):
            self._post(trial.candidate)
            return
        medians = trial.medians()
        best = trial.candidates[int(np.argmin(medians))]
        self._post(best)
        self.decided = True
        each = zip(trial.candidates, medians, strict=True)
        tried = ", ".join(f"{list(one.shares)} {seconds * 1e3:.1f} ms" for one, seconds in each)
        self._report(
            f"shares {list(best.shares)} with {best.dispatch}: {min(medians) * 1e3:.1f} ms an iteration, "
            f"the quickest of those tried ({tried})"
        )

    def _post(self, outcome: Outcome) -> None:
        postbox = self._training.runtime.postbox
        if outcome.dispatch != self._dispatcher:
            postbox.post("dispatcher", outcome.dispatch)
            self._dispatcher = outcome.dispatch
        postbox.post("shares", tuple(outcome.shares))


class _Trial:
    """Times candidates one after the other."""

    def __init__(self, candidates: list[Outcome]) -> None:
        self.candidates, self.place = candidates, 0
        self._seconds: list[list[float]] = [[] for _ in candidates]

    @property
    def candidate(self) -> Outcome:
        """The current one."""
        return self.candidates[self.place]

    def is_timed(self, shares: npt.NDArray[np.int64], seconds: float) -> bool:
        """Record an iteration with these samples per worker; return whether the candidate is timed."""
        if shares.tolist() == list(self.candidate.shares):
            self._seconds[self.place].append(seconds)
        return len(self._seconds[self.place]) >= TRIAL_ITERATIONS

    def medians(self) -> list[float]:
        """The median iterations, without the first ones, when rows still move to other workers."""
        return [statistics.median(seconds[TRIAL_ITERATIONS // 2 :]) for seconds in self._seconds]


def first_batches(stream: SampleStream, collection: EmbeddingBagCollection) -> list[IdBatch]:
    """Read the ids of the batches to simulate, as the scheduler will see them."""
    beginning = stream.from_beginning(TRIED_BATCHES * stream.batch_size)
    return layout_of(collection).records_read([ids_of(collection, samples) for samples in beginning])


def seconds_per_sample(observed: list[npt.NDArray[np.float64]]) -> tuple[float, ...]:
    """Return the compute time of a sample on each worker; the median for one that has trained none."""
    compute, samples = MEASURES.index("compute"), MEASURES.index("samples")
    every = np.stack(observed)  # iterations x workers x measures
    trained = every[:, :, samples]
    each = np.divide(every[:, :, compute], trained, out=np.full(trained.shape, np.nan), where=trained > 0)
    typical = np.full(each.shape[1], np.nan)
    active = np.isfinite(each).any(axis=0)
    typical[active] = np.nanmedian(each[:, active], axis=0)
    others = float(np.median(typical[active])) if active.any() else 0.0
    return tuple(np.where(active, typical, others).tolist())


def sum_seconds(observed: list[npt.NDArray[np.float64]]) -> float:
    """Return the time of the dense sum: that of the last worker to arrive, which waits for nothing else."""
    waited = np.stack(observed)[:, :, MEASURES.index("all_reduce")]
    return float(np.median(waited.min(axis=1)))


def candidates(
    settings: ScheduleSettings,
    batches: list[IdBatch],
    links: MeasuredLinks,
    compute_seconds: tuple[float, ...],
    dense_seconds: float,
) -> list[Outcome]:
    """Return the shares to try: the best simulated, equal ones, and equal ones on the best workers."""
    settings = replace(settings, shares=None)
    simulation = Simulation(
        batches=lambda: batches,
        batch_size=len(batches[0].offsets) - 1,
        schedule=settings,
        model=TimeModel(links.for_time_model(settings), compute_seconds, dense_seconds=dense_seconds),
        iterations=len(batches),
        warmup=min(WARM_UP_BATCHES, len(batches) - 1),
    )
    outcomes = simulation.run([str(settings.dispatcher)], "auto")
    return list({outcome.shares: outcome for outcome in outcomes}.values())
