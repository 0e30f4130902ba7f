"""Times of the latest iterations: the part of the hot-row model that only training can measure."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.mover import Job
from rowhaul.runtime.runtime import CPU
from rowhaul.simulate.hot import Processors
from rowhaul.tuning.shares import seconds_per_sample

CALM = 0.25  # the quantile of iteration times that counts: other load on a machine only adds to them


class Watch:
    """Remembers the times of some iterations.

    Args:
        num_workers: whose compute counts.
        length: the number of iterations to remember.
    """

    def __init__(self, num_workers: int, length: int) -> None:
        self.num_seen = 0
        self.seconds_since_rest: list[float] = []  # of iterations, except the first
        self._num_workers = num_workers
        self._measures: deque[npt.NDArray[np.float64]] = deque(maxlen=length)
        self._seconds: deque[float] = deque(maxlen=length)
        self._cpu: deque[tuple[float, int, int]] = deque(maxlen=length)  # CPU seconds, rows moved, summed
        self._cpu_before: float | None = None
        self._last: float | None = None

    def observe(self, job: Job) -> None:
        """Record an iteration."""
        now, self.num_seen = time.perf_counter(), self.num_seen + 1
        if self._last is not None:
            self._seconds.append(now - self._last)
            self.seconds_since_rest.append(now - self._last)
        self._last = now
        if job.measures is None:
            return
        self._measures.append(job.measures[: self._num_workers].copy())
        cpu = float(job.measures[:, CPU].sum())
        if self._cpu_before is not None:
            self._cpu.append((cpu - self._cpu_before, len(job.plan.moves), job.plan.all_reduce_rows))
        self._cpu_before = cpu

    def rested(self) -> None:
        """Drop all iteration times: the rows may have been exchanged."""
        self._last = self._cpu_before = None
        for one in (self._cpu, self._seconds, self.seconds_since_rest):
            one.clear()

    @property
    def iteration_seconds(self) -> float:
        """The time of an undisturbed iteration; 0 if unknown."""
        return float(np.quantile(self._seconds, CALM)) if self._seconds else 0.0

    def compute_seconds(self) -> tuple[float, ...]:
        """The compute time of a sample on each worker."""
        return seconds_per_sample(list(self._measures)) if self._measures else (0.0,) * self._num_workers

    def with_the_rest(self, processors: Processors, share: float) -> Processors:
        """Add the processor time of an iteration that neither moved nor summed rows account for.

        ``share`` is the part of all ranks' CPU seconds that falls on the processors of one host.
        """
        if not self._cpu:
            return processors
        cpu, moved, summed = (float(np.median(column)) for column in zip(*self._cpu, strict=True))
        rest = cpu * share - replace(processors, seconds=0.0).busy(moved, summed)
        return replace(processors, seconds=max(rest, 0.0))
