"""`laia`: each sample to the worker that holds most of its rows (Herald, algorithm 1)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch.cost_kernels import allocate_by_score
from rowhaul.schedule.dispatch.task import DispatchTask


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
