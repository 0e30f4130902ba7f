"""What a dispatcher sees: the samples, where their rows are, and what moving them costs.

Dispatchers see this and nothing else, so that a new one is one file. Everything is an integer;
costs are sizes times prices, in units that only compare with each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.threads import Threads


@dataclass(frozen=True)
class DispatchTask:
    """One batch to divide among the workers.

    Sample i needs the distinct rows ``rows[offsets[i]:offsets[i + 1]]``; the arrays below them say
    of every row where its latest version is. Workers are numbered 0 .. n-1; masks have bit j for
    worker j.
    """

    offsets: npt.NDArray[np.int64]  # samples + 1
    rows: npt.NDArray[np.int32]  # index into the arrays of rows below; a sample names a row once

    tables: npt.NDArray[np.int32]  # rows, ordered by (table, key)
    latest: npt.NDArray[np.uint64]  # rows: workers that hold the latest record and need no transfer
    owner: npt.NDArray[np.int16]  # rows: the worker that alone holds it (it must push for others), or -1
    partial: npt.NDArray[np.uint64]  # rows: workers that owe a gradient (split rows), or 0
    free: npt.NDArray[np.uint8]  # rows: 1 where training moves nothing (fresh, hot, not admitted)
    home: npt.NDArray[np.int16]  # rows: the worker beside which the row is stored (co-located), or -1
    record_size: npt.NDArray[np.int64]  # rows: values and optimizer state
    value_size: npt.NDArray[np.int64]  # rows: values alone, also a gradient
    # Rows: iterations until the row is needed again, as far as the window shows; 0 where it shows none.
    next_use: npt.NDArray[np.int32]

    prices: npt.NDArray[np.int64]  # workers: cost of one unit of size over the worker's link
    capacities: npt.NDArray[np.int64]  # workers: samples each may train; they add up to the batch or more
    seed: int  # differs from iteration to iteration
    peer_to_peer: bool = False  # an owner sends to every trainer itself, instead of once to the home
    threads: Threads = field(default_factory=Threads)  # to decide with; they change nothing but the time

    @property
    def row_locations(self) -> tuple[Any, ...]:
        """Where the rows are and how large they are, in the order that kernels take."""
        return (
            self.latest, self.owner, self.partial, self.free, self.home, self.record_size, self.value_size,
        )  # fmt: skip

    @property
    def num_samples(self) -> int:
        """Samples in the batch."""
        return len(self.offsets) - 1

    @property
    def num_workers(self) -> int:
        """Workers, with and without capacity."""
        return len(self.prices)


class Dispatcher(Protocol):
    """Decides which worker trains which sample."""

    @property
    def name(self) -> str:
        """What it is called on the command line."""

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        """The worker of each sample; no worker gets more samples than its capacity."""


def is_blind(dispatcher: Dispatcher) -> bool:
    """Whether a dispatcher declares ``blind = True``: it looks at numbers of samples only.

    Rows are not described to it, which would take longer than its decision.
    """
    return bool(getattr(dispatcher, "blind", False))


@runtime_checkable
class LooksAhead(Dispatcher, Protocol):
    """A dispatcher that can weigh what an assignment does to the next batch."""

    def assign_ahead(
        self, task: DispatchTask, follow: Callable[[npt.NDArray[np.int32]], DispatchTask | None]
    ) -> npt.NDArray[np.int32]:
        """Like `assign`; ``follow`` returns the next batch's task after an assignment of this one, or None at
        the end of the stream. It must not change anything.
        """


@runtime_checkable
class Learns(Dispatcher, Protocol):
    """A dispatcher that learns from the caches from time to time; `learn` returns its successor."""

    def learns_at(self, iteration: int) -> bool:
        """Whether `learn` should be called before this iteration is planned."""

    def learn(
        self, tables: npt.NDArray[np.int32], appearances: npt.NDArray[np.int32], samples_per_worker: int
    ) -> Dispatcher:
        """The dispatcher to continue with.

        Args:
            tables: the table of every row that some worker's cache holds.
            appearances: in how many samples each of them has appeared so far.
            samples_per_worker: samples trained so far, divided by the workers.
        """

    def learnt(self) -> npt.NDArray[np.int64] | None:
        """What it has learnt, for checkpoints; None before the first time."""

    def recall(self, learnt: npt.NDArray[np.int64]) -> Dispatcher:
        """The dispatcher that has learnt this before."""
