"""The seam between the scheduler and the synchronisation modes: an iteration in, its moves out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.plan import Moves, Steps
from rowhaul.schedule.saved import Arrays, Saved
from rowhaul.schedule.sizes import RowSizes
from rowhaul.schedule.sync.move_kernels import local_last, move_columns
from rowhaul.schedule.topology import Topology

Int32s = npt.NDArray[np.int32]

MOVE = np.dtype(
    [
        ("key", np.int64),
        ("num_bytes", np.int64),
        ("table", np.int32),
        ("ready", np.int32),
        ("source", np.int16),
        ("target", np.int16),
        ("kind", np.uint8),
        ("payload", np.uint8),
        ("after", np.uint8),
        ("second", np.uint8),
    ],
    align=True,
)

STEP = np.dtype(
    [
        ("key", np.int64),
        ("contributors", np.uint64),
        ("table", np.int32),
        ("trained", np.int32),
        ("ready", np.int32),
        ("rank", np.int16),
        ("after", np.uint8),
        ("by_peer", np.uint8),
    ],
    align=True,
)


class Wiring:
    """What stays the same from iteration to iteration, as kernels take it."""

    def __init__(self, topology: Topology, sizes: RowSizes, look_ahead: int) -> None:
        self.num_workers = topology.num_workers
        self.colocated = topology.colocated
        self.first_store = topology.first_store
        self.num_shards = topology.sharding
        self.peer_to_peer = topology.peer_to_peer
        self.look_ahead = look_ahead
        self.use(sizes)

    def use(self, sizes: RowSizes) -> None:
        """Rows have these sizes from now on."""
        self.value_bytes = np.array(sizes.values, np.int64)  # tables
        self.state_bytes = np.array(sizes.state, np.int64)  # tables
        self.record_bytes = self.value_bytes + self.state_bytes


@dataclass(frozen=True)
class Step:
    """One iteration as the modes see it: trained rows and evicted copies, by their slots."""

    iteration: int
    slots: npt.NDArray[Any]  # the directory's, changed in place
    rows: npt.NDArray[np.int32]  # slots of the batch's rows, ordered by (table, key)
    trainers: npt.NDArray[np.uint64]  # rows: who trains each
    evicted_from: npt.NDArray[np.int16]  # evictions: the worker
    victims: npt.NDArray[np.int32]  # evictions: the slot
    most_moves: int  # a bound on the moves that all this can cause


@dataclass(frozen=True)
class Outcome:
    """What an iteration moves, and what it found where."""

    moves: Moves
    local_moves: Moves | None
    steps: Steps
    states: npt.NDArray[np.uint8]  # rows: the state before
    lookups: npt.NDArray[np.int64]  # workers
    hits: npt.NDArray[np.int64]  # workers
    all_reduce_rows: int
    all_reduce_bytes: int
    # The place in the batch of the row of every move and step, as of `Plan`.
    move_rows: npt.NDArray[np.int32] | None = None
    local_move_rows: npt.NDArray[np.int32] | None = None
    step_rows: npt.NDArray[np.int32] | None = None


class Exchange(Protocol):
    """A synchronisation mode at work; it keeps the row states."""

    keeps_split_copies: bool  # whether copies of a row that several trained are worth keeping

    def step(self, step: Step) -> Outcome:
        """Plan the moves of one iteration and bring the states to its end."""
        ...

    def owing(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        """Who has updates of these rows, beyond what row states say, that the home has not."""
        ...

    def forget(self, slots: npt.NDArray[np.int32]) -> None:
        """Know nothing any more, beyond the row states, of the rows in these slots."""
        ...

    def export(self, slots: npt.NDArray[np.int32]) -> Arrays:
        """What the mode knows of the rows in these slots (all there are) beside the directory."""
        ...

    def restore(self, saved: Saved, slots: npt.NDArray[np.int32]) -> None:
        """Know what was known where `export` was called; nothing may have been planned here yet."""
        ...


class Notebook:
    """Where kernels write moves and steps down; used again in the next iteration."""

    def __init__(self) -> None:
        self.moves: npt.NDArray[Any] = np.zeros(0, MOVE)
        self.steps: npt.NDArray[Any] = np.zeros(0, STEP)
        # The row of each, where kernels say so.
        self.move_rows: Int32s = np.zeros(0, np.int32)
        self.step_rows: Int32s = np.zeros(0, np.int32)
        self._orders: tuple[Int32s, Int32s | None] = self.move_rows, None

    def make_room(self, step: Step) -> None:
        """Have room for all that an iteration can cause."""
        if len(self.moves) < step.most_moves:
            self.moves = np.zeros(step.most_moves + step.most_moves // 4, MOVE)
            self.move_rows = np.zeros(len(self.moves), np.int32)
        most_steps = len(step.rows) + len(step.victims)
        if len(self.steps) < most_steps:
            self.steps = np.zeros(most_steps + most_steps // 4, STEP)
            self.step_rows = np.zeros(len(self.steps), np.int32)

    def moves_written(self, count: int, colocated: bool) -> tuple[Moves, Moves | None]:
        """The first moves, copied out: those between ranks, and those within one where that can be."""
        between, within = self._orders = self._ordered(count, colocated)
        moves = Moves(*move_columns(self.moves, between))
        return moves, None if within is None else Moves(*move_columns(self.moves, within))

    def rows_written(self) -> tuple[Int32s, Int32s | None]:
        """The rows of the moves copied out last, where kernels have noted them."""
        between, within = self._orders
        return self.move_rows[between], None if within is None else self.move_rows[within]

    def steps_written(self, count: int) -> Steps:
        """The first steps, copied out."""
        used = self.steps[:count]
        return Steps(**{name: used[name].copy() for name in Steps.__dataclass_fields__})

    def _ordered(self, count: int, colocated: bool) -> tuple[Int32s, Int32s | None]:
        if not colocated:
            return np.arange(count, dtype=np.int32), None
        order, apart = local_last(self.moves, count)
        return order[:apart], order[apart:]
