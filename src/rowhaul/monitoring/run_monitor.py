"""The numbers of a run, as the training thread leaves them for others to read.

There is one writer, and no lock that could make it wait: a reader finds every single number as it was before
or after a step. Counters count from the start of this process, also when the run was resumed: Prometheus
takes a counter that has become smaller for one that began again at 0.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from rowhaul.monitoring.monitor import FINISHED, SAVING, STARTING, Monitor, RankLabels
from rowhaul.schedule import Plan
from rowhaul.schedule.plan import KIND_NAMES, ROW_COUNTS, Kind, RowCounts

Ints = npt.NDArray[np.int64]


class RunMonitor(Monitor):
    """Keeps the numbers of a run; `rowhaul.monitoring.collector` shows them to Prometheus."""

    def __init__(self) -> None:
        self.phase, self.error = STARTING, _nothing
        self.progressed_at = time.monotonic()
        self.step, self.samples, self.first_samples = 0, 0, 0
        self.num_steps, self.total_steps, self.total_samples = 0, 0, 0
        self.loss = self.samples_per_second = self.last_step_time = float("nan")
        self.evaluation: dict[str, float] = {}
        self.progressive: dict[str, float] = {}  # the last window
        self.rows: dict[str, int] = {}  # by table
        self.checkpoints, self.checkpoint_failures = 0, 0
        self.checkpoint_step, self.checkpoint_time, self.checkpoint_seconds = 0, 0.0, 0.0  # of the last one
        self.is_cluster = False
        self._describe([RankLabels(0, "worker", socket.gethostname())], (), ())

    def _describe(self, ranks: Sequence[RankLabels], tables: Sequence[str], measures: Sequence[str]) -> None:
        count = len(ranks)
        self.ranks, self.tables, self.measures = tuple(ranks), tuple(tables), tuple(measures)
        self.links = np.zeros((count, count), np.int64)  # bytes, source x target
        self.table_bytes = np.zeros(len(tables), np.int64)
        self.moved_rows, self.moved_bytes = (np.zeros(len(KIND_NAMES), np.int64) for _ in range(2))
        self.all_reduce_bytes = 0
        self.hits, self.lookups, self.rank_samples = (np.zeros(count, np.int64) for _ in range(3))
        self.iterations = np.full(count, self.step, np.int64)  # that each rank has finished
        self.sums = np.zeros((count, len(measures)))  # over this process's iterations
        self.latest = np.zeros((count, len(measures)))
        self.row_counts = RowCounts()

    def joined(
        self,
        ranks: Sequence[RankLabels],
        tables: Sequence[str],
        measures: Sequence[str],
        error: Callable[[], BaseException | None],
    ) -> None:
        """Make room for the numbers of all ranks."""
        self._describe(ranks, tables, measures)
        self.error, self.is_cluster = error, True
        self._progress()

    def started(self, step: int, samples: int, total_steps: int, total_samples: int) -> None:
        """Begin to count."""
        self.total_steps, self.total_samples, self.first_samples = total_steps, total_samples, samples
        self.iterations[:] = step
        self.reach(step, samples)

    def begin(self, phase: str) -> None:
        """Enter a phase."""
        self.phase = phase
        self._progress()

    def _progress(self) -> None:
        self.progressed_at = time.monotonic()

    def reach(self, step: int, samples: int) -> None:
        """Count the steps and samples so far."""
        self.step, self.samples = step, samples
        self._progress()

    def stepped(self, step: int, samples: int, loss: float) -> None:
        """Count a step."""
        if not self.is_cluster:
            self.rank_samples[0] += samples - self.samples
            self.iterations[0] = step
        self.reach(step, samples)
        self.num_steps += 1
        self.loss, self.last_step_time = loss, time.time()

    def logged(self, samples_per_second: float) -> None:
        """Keep the speed."""
        self.samples_per_second = samples_per_second

    def hold(self, rows: Mapping[str, int]) -> None:
        """Keep how many rows each table has."""
        self.rows = dict(rows)

    def iterated(self, plan: Plan, measures: npt.NDArray[np.float64] | None) -> None:
        """Add the moves of an iteration, and what ranks have measured."""
        if not self.is_cluster:  # a rank that logs, but does not serve
            return
        moves, count = plan.moves, len(self.ranks)
        link = moves.source.astype(np.int64) * count + moves.target
        self.links += _sums(link, moves.num_bytes, count * count).reshape(count, count)
        self.table_bytes += _sums(moves.table, moves.num_bytes, len(self.tables))
        self.moved_bytes += _sums(moves.kind, moves.num_bytes, len(KIND_NAMES))
        self.moved_rows += np.bincount(moves.kind, minlength=len(KIND_NAMES))
        self.all_reduce_bytes += plan.all_reduce_bytes
        self.lookups[: plan.num_workers] += plan.lookups
        self.hits[: plan.num_workers] += plan.hits
        self.rank_samples += np.bincount(plan.worker, minlength=count)
        self.row_counts += RowCounts.of_plan(plan)
        if measures is not None:
            self._measure(measures, has_rows=bool(plan.lookups.any()))

    def _measure(self, measures: npt.NDArray[np.float64], *, has_rows: bool) -> None:
        """Add measurements once for every iteration that ranks have finished since the last ones.

        A message brings those of the latest iteration: they stand for one that no message has brought, and
        are not counted again where a message repeats them. Rows count where the plan has none.
        """
        finished = measures[:, self.measures.index("iteration")].astype(np.int64)
        more = np.maximum(finished - self.iterations, 0)[:, None] * measures
        self.sums += more
        if not has_rows and set(ROW_COUNTS) <= set(self.measures):
            self._count_rows(*more[:, [self.measures.index(name) for name in ROW_COUNTS]].T.astype(np.int64))
        np.maximum(self.iterations, finished, out=self.iterations)
        self.latest = measures

    def _count_rows(self, needed: Ints, here: Ints, num_bytes: Ints, served: Ints) -> None:
        """Count rows that stay at home: those that are not here are read, and their gradients returned."""
        self.lookups += needed
        self.hits += here
        for kind in (Kind.MISS_PULL, Kind.UPDATE_PUSH):
            self.moved_rows[kind] += (needed - here).sum()
            self.moved_bytes[kind] += num_bytes.sum()

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the metrics of an evaluation."""
        self.evaluation = {"step": step, **values}
        self._progress()

    def scored(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the metrics of a window."""
        self.progressive = {"step": step, **values}

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Show that the run is saving."""
        before = self.phase
        self.begin(SAVING)
        try:
            with super().saving(step):
                yield
        finally:
            self.begin(before)

    def saved(self, step: int, seconds: float) -> None:
        """Count a checkpoint."""
        self.checkpoint_step, self.checkpoint_time, self.checkpoint_seconds = step, time.time(), seconds
        self.checkpoints += 1

    def save_failed(self, step: int) -> None:
        """Count a checkpoint that could not be saved."""
        self.checkpoint_failures += 1

    def finish(self) -> None:
        """Stop waiting for progress."""
        self.begin(FINISHED)


def _nothing() -> BaseException | None:
    return None


def _sums(places: npt.NDArray[np.integer], values: Ints, count: int) -> Ints:
    """Sum values by place; exact, as none comes near 2**53."""
    return np.bincount(places, values, count).astype(np.int64)
