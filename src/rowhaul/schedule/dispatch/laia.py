"""`laia`: each sample to the worker that holds most of its rows (Herald, algorithm 1)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch.task import DispatchTask
from rowhaul.schedule.topology import row_hash


@dataclass(frozen=True)
class Laia:
    """In batch order, each sample to the best-scoring worker with room, ties at random.

    A score counts the sample's rows whose latest version is on the worker. With several threads,
    samples and room are divided among them evenly, and each allocates its own without a look at the
    others': faster on large batches, a little worse, and the same every time for the same number of threads.
    """

    threads: int = 1
    name: ClassVar[str] = "laia"

    def __post_init__(self) -> None:
        check_threads(self.name, self.threads)

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        """The worker of each sample."""
        return allocate(task, None, self.threads)


MOST_THREADS = 64


def check_threads(name: str, threads: int) -> None:
    """Refuse a number of threads that cannot be."""
    if not 1 <= threads <= MOST_THREADS:
        raise ConfigError(f"{name} takes 1 to {MOST_THREADS} threads; got threads={threads}")


def allocate(task: DispatchTask, scored: npt.NDArray[np.bool_] | None, threads: int) -> npt.NDArray[np.int32]:
    """Allocate samples by the rows that are on each worker, all of them or only those ``scored``."""
    worker = np.empty(task.num_samples, np.int32)

    def work(thread: int) -> None:
        room = _room_of_thread(task, thread, threads)
        allocate_by_score(
            task.offsets, task.rows, task.latest, scored, room, task.seed, thread, threads, worker
        )

    if threads == 1:
        work(0)
    else:
        list(_pool(threads).map(work, range(threads)))
    return worker


def _room_of_thread(task: DispatchTask, thread: int, threads: int) -> npt.NDArray[np.int64]:
    """A thread's part of every worker's room: at least as many places as it has samples.

    All places stand in a row, worker by worker. Thread t takes every ``threads``-th of them from t
    on, as it does with the samples, of which there are no more.
    """
    ends = np.cumsum(np.minimum(task.capacities, task.num_samples))
    taken = (ends - thread + threads - 1) // threads
    return np.diff(taken, prepend=0)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rowhaul-dispatch")


@kernel
def allocate_by_score(offsets, rows, latest, scored, room, seed, first, step, worker):
    """Give samples first, first + step, ... to the worker with room that holds most of their latest rows.

    Only rows that are ``scored`` count, or all where it is None. Ties are broken at random, by the
    sample's number; ``room`` is used up.
    """
    num_workers = len(room)
    score = np.empty(num_workers, np.int64)
    for i in range(first, len(offsets) - 1, step):
        score[:] = 0
        for at in range(offsets[i], offsets[i + 1]):
            x = rows[at]
            if scored is not None and not scored[x]:
                continue
            holders = np.int64(latest[x])
            for j in range(num_workers):
                score[j] += (holders >> j) & 1
        best, num_best = np.int64(-1), 0
        for j in range(num_workers):
            if room[j] > 0:
                if score[j] > best:
                    best, num_best = score[j], 1
                elif score[j] == best:
                    num_best += 1
        skipped = np.int64(row_hash(seed, i) % np.uint64(num_best))
        for j in range(num_workers):
            if room[j] > 0 and score[j] == best:
                if skipped == 0:
                    worker[i] = j
                    room[j] -= 1
                    break
                skipped -= 1
