"""Which rows have changed, as one rank needs to know it for a delta: plans say it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.plan import Plan
from rowhaul.schedule.row_states import State
from rowhaul.schedule.topology import Topology, homes_of
from rowhaul.store.changes import ChangedRows, Changes

Tables = npt.NDArray[np.int32]
Keys = npt.NDArray[np.int64]


class RowChanges:
    """Notes changes from plans: of rows that the rank is home of, and of those in its cache.

    A row that only a worker has was trained by that worker last, and a replicated one is stepped by all: so
    the rank with the latest record of a row knows whether it has changed.

    Args:
        rank: of this process.
        topology: workers and stores.
        num_tables: that plans number.
        is_home: whether the rank stores rows.
        is_worker: whether it trains.
    """

    def __init__(
        self, rank: int, topology: Topology, num_tables: int, *, is_home: bool, is_worker: bool
    ) -> None:
        self._rank, self._topology = rank, topology
        self._at_home = ChangedRows(num_tables) if is_home else None
        self._in_cache = ChangedRows(num_tables) if is_worker else None
        self._waiting: list[tuple[Tables, Keys]] = []

    def note(self, plan: Plan) -> None:
        """Note the rows that an iteration trains, and those that are dropped after it."""
        trained = (plan.trainers != 0) & (plan.states != State.NOT_ADMITTED)
        step = plan.iteration + 1
        self._note_at_home(step, plan.tables[trained], plan.keys[trained])
        if plan.forgotten_tables is not None and plan.forgotten_keys is not None:
            self._note_at_home(step, plan.forgotten_tables, plan.forgotten_keys)
        if self._in_cache is not None:
            here = (plan.trainers >> np.uint64(self._rank)) & np.uint64(1) != 0
            here = trained & (here | (plan.states == State.REPLICATED))
            self._in_cache.note(step, plan.tables[here].astype(np.int64), plan.keys[here])

    def note_stepped(self, step: int, tables: npt.NDArray[np.int64], keys: Keys) -> None:
        """Note rows that this rank is home of, and has stepped without a plan."""
        if self._at_home is not None:
            self._at_home.note(step, tables, keys)

    def note_moved(self, step: int, tables: Tables, keys: Keys) -> None:
        """Note rows that begin or cease to be replicated: another rank may have their latest record now."""
        self._note_at_home(step, tables, keys)
        if self._in_cache is not None:
            self._in_cache.note(step, tables.astype(np.int64), keys)

    def note_waiting(self, tables: Tables, keys: Keys) -> None:
        """Note rows that are saved with updates which their home does not have yet (bounded staleness).

        When it gets them, it steps by other sums, with another rate: what is saved of these rows differs from
        one checkpoint to the next.
        """
        self._waiting.append((tables, keys))

    def seal(self, step: int) -> Changes | None:
        """Return all changes at home up to a step, the current one; None where the rank stores nothing."""
        for rows in self._waiting:
            self._note_at_home(step, *rows)
        changes = self._at_home.seal() if self._at_home is not None else None
        for rows in self._waiting:
            self._note_at_home(step + 1, *rows)
        self._waiting.clear()
        return changes

    def seal_cache(self) -> Changes | None:
        """Return all changes of rows that this worker has trained, or that all workers have."""
        return self._in_cache.seal() if self._in_cache is not None else None

    def forget(self, step: int) -> None:
        """Free what nobody will ask for: changes up to a step."""
        for one in (self._at_home, self._in_cache):
            if one is not None:
                one.forget(step)

    def _note_at_home(self, step: int, tables: Tables, keys: Keys) -> None:
        if self._at_home is not None:
            here = homes_of(tables, keys, self._topology) == self._rank
            self._at_home.note(step, tables[here].astype(np.int64), keys[here])
