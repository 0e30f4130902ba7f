"""Which rows that a rank is home of have changed, wherever they were trained: plans say it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.plan import Plan
from rowhaul.schedule.row_states import State
from rowhaul.schedule.topology import Topology, homes_of
from rowhaul.store.changes import ChangedRows, Changes


class ChangedRowsAtHome:
    """Notes changes from plans.

    Args:
        rank: a home.
        topology: workers and stores.
        num_tables: that plans number.
    """

    def __init__(self, rank: int, topology: Topology, num_tables: int) -> None:
        self._rank, self._topology = rank, topology
        self.rows = ChangedRows(num_tables)
        self._waiting: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]] = []

    def note(self, plan: Plan) -> None:
        """Note the rows that an iteration trains, and those that are dropped after it."""
        trained = (plan.trainers != 0) & (plan.states != State.NOT_ADMITTED)
        self._note(plan.iteration + 1, plan.tables[trained], plan.keys[trained])
        if plan.forgotten_tables is not None and plan.forgotten_keys is not None:
            self._note(plan.iteration + 1, plan.forgotten_tables, plan.forgotten_keys)

    def note_waiting(self, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        """Note rows that are saved with updates which their home does not have yet (bounded staleness).

        When it gets them, it steps by other sums, with another rate: what is saved of these rows differs from
        one checkpoint to the next.
        """
        self._waiting.append((tables, keys))

    def seal(self, step: int) -> Changes:
        """Return all changes up to a step, the current one."""
        for rows in self._waiting:
            self._note(step, *rows)
        changes = self.rows.seal()
        for rows in self._waiting:
            self._note(step + 1, *rows)
        self._waiting.clear()
        return changes

    def _note(self, step: int, tables: npt.NDArray[np.int32], keys: npt.NDArray[np.int64]) -> None:
        here = homes_of(tables, keys, self._topology) == self._rank
        self.rows.note(step, tables[here].astype(np.int64), keys[here])
