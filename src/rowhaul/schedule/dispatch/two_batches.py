"""`two-batch`: choose between two assignments of a batch by what the next batch will cost (Herald, 7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.dispatch.costs import true_cost
from rowhaul.schedule.dispatch.random import shuffle
from rowhaul.schedule.dispatch.task import Dispatcher, DispatchTask, Learns


@dataclass(frozen=True)
class TwoBatches:
    """Wraps a dispatcher: the power of two choices, over two iterations."""

    inner: Dispatcher
    name: ClassVar[str] = "two-batch"

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        """The inner dispatcher's worker of each sample."""
        return self.inner.assign(task)

    def assign_ahead(
        self, task: DispatchTask, follow: Callable[[npt.NDArray[np.int32]], DispatchTask | None]
    ) -> npt.NDArray[np.int32]:
        """The better of two assignments, by the true cost of this batch and the next; see `LooksAhead`."""
        first, second = self.inner.assign(task), self._assign_otherwise(task)
        if np.array_equal(first, second):
            return first
        return min(first, second, key=lambda worker: self._cost_of_both(task, worker, follow(worker)))

    def _assign_otherwise(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        """An assignment that is as good but for luck: another seed, and the samples in another order.

        The order decides ties of the dispatchers that never look at the seed.
        """
        order = np.arange(task.num_samples)
        shuffle(order, task.seed)
        lengths = np.diff(task.offsets)[order]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        taken = np.repeat(task.offsets[:-1][order] - offsets[:-1], lengths) + np.arange(offsets[-1])
        shuffled = replace(task, offsets=offsets, rows=task.rows[taken], seed=task.seed ^ 1)
        worker = np.empty(task.num_samples, np.int32)
        worker[order] = self.inner.assign(shuffled)
        return worker

    def _cost_of_both(
        self, task: DispatchTask, worker: npt.NDArray[np.int32], following: DispatchTask | None
    ) -> int:
        cost = true_cost(task, worker)
        return cost if following is None else cost + true_cost(following, self.inner.assign(following))

    def learns_at(self, iteration: int) -> bool:
        """Whether the inner dispatcher learns before this iteration."""
        return isinstance(self.inner, Learns) and self.inner.learns_at(iteration)

    def learn(
        self, tables: npt.NDArray[np.int32], appearances: npt.NDArray[np.int32], samples_per_worker: int
    ) -> TwoBatches:
        """This wrapper with an inner dispatcher that has learnt."""
        assert isinstance(self.inner, Learns), f"{self.inner.name} does not learn"
        return replace(self, inner=self.inner.learn(tables, appearances, samples_per_worker))

    def learnt(self) -> npt.NDArray[np.int64] | None:
        """What the inner dispatcher has learnt."""
        return self.inner.learnt() if isinstance(self.inner, Learns) else None

    def recall(self, learnt: npt.NDArray[np.int64]) -> TwoBatches:
        """This wrapper with an inner dispatcher that has learnt this before."""
        assert isinstance(self.inner, Learns), f"{self.inner.name} does not learn"
        return replace(self, inner=self.inner.recall(learnt))
