"""`laia-adaptive`: LAIA over the tables that matter most, as many as the time allows (Herald, 4.3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch.laia import allocate, check_threads
from rowhaul.schedule.dispatch.task import DispatchTask


@dataclass(frozen=True)
class LaiaAdaptive:
    """Scores only the rows of the ``tables_scored`` tables with the highest degree of infrequency.

    All tables are scored while ``tables_scored`` is none, and before the first ranking is learnt.
    """

    tables_scored: int | None = None
    refresh_every: int = 20  # iterations from one ranking to the next
    threads: int = 1
    ranking: tuple[int, ...] | None = None  # tables, highest degree of infrequency first; learnt
    name: ClassVar[str] = "laia-adaptive"

    def __post_init__(self) -> None:
        check_threads(self.name, self.threads)
        if self.tables_scored is not None and self.tables_scored < 0:
            raise ConfigError(f"tables_scored must not be negative; got {self.tables_scored}")
        if self.refresh_every < 1:
            raise ConfigError(f"refresh_every must be at least 1 iteration; got {self.refresh_every}")

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        """The worker of each sample."""
        if self.tables_scored is None or self.ranking is None:
            return allocate(task, None, self.threads)
        scored = np.zeros(1 + max(*self.ranking, task.tables.max(initial=0), 0), np.bool_)  # tables
        scored[list(self.ranking[: self.tables_scored])] = True
        return allocate(task, scored[task.tables], self.threads)

    def learns_at(self, iteration: int) -> bool:
        """Whether `learn` should be called before this iteration is planned."""
        return iteration > 0 and iteration % self.refresh_every == 0

    def learn(
        self, tables: npt.NDArray[np.int32], appearances: npt.NDArray[np.int32], samples_per_worker: int
    ) -> LaiaAdaptive:
        """This dispatcher with a new ranking of the tables; see `rank_tables`."""
        return replace(self, ranking=rank_tables(tables, appearances, samples_per_worker))

    def learnt(self) -> npt.NDArray[np.int64] | None:
        """The ranking; see `Learns`."""
        return None if self.ranking is None else np.array(self.ranking, np.int64)

    def recall(self, learnt: npt.NDArray[np.int64]) -> LaiaAdaptive:
        """This dispatcher with a ranking; see `Learns`."""
        return replace(self, ranking=tuple(learnt.tolist()))


def rank_tables(
    tables: npt.NDArray[np.int32], appearances: npt.NDArray[np.int32], samples_per_worker: int
) -> tuple[int, ...]:
    """Tables by their degree of infrequency, highest first; equal ones by their number.

    A cached row is infrequent when it appeared in fewer samples than one worker has trained; the
    degree of a table is the share of such rows among its cached ones. Tables without a cached row
    cannot score and are left out.

    Args:
        tables: the table of every row that some worker's cache holds.
        appearances: in how many samples each of them has appeared so far.
        samples_per_worker: samples that one worker has trained so far, in the mean.
    """
    cached = np.bincount(tables)
    infrequent = np.bincount(tables[appearances < samples_per_worker], minlength=len(cached))
    known = np.flatnonzero(cached)
    degree = infrequent[known] / cached[known]
    return tuple(known[np.argsort(-degree, kind="stable")].tolist())
