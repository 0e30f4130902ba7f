"""The seam between the scheduler and the synchronisation modes: an iteration in, its moves out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.plan import Moves
from rowhaul.schedule.sizes import RowSizes
from rowhaul.schedule.sync.kernels import columns
from rowhaul.schedule.topology import Topology

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
    ],
    align=True,
)


class Wiring:
    """What stays the same from iteration to iteration, as kernels take it."""

    def __init__(self, topology: Topology, sizes: RowSizes, look_ahead: int) -> None:
        self.num_workers = topology.num_workers
        self.first_store = topology.first_store
        self.num_shards = topology.num_shards
        self.peer_to_peer = topology.peer_to_peer
        self.value_bytes = np.array(sizes.values, np.int64)  # tables
        self.state_bytes = np.array(sizes.state, np.int64)  # tables
        self.record_bytes = self.value_bytes + self.state_bytes
        self.look_ahead = look_ahead


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
    states: npt.NDArray[np.uint8]  # rows: the state before
    lookups: npt.NDArray[np.int64]  # workers
    hits: npt.NDArray[np.int64]  # workers
    all_reduce_rows: int
    all_reduce_bytes: int


class Exchange(Protocol):
    """A synchronisation mode at work; it keeps the row states."""

    keeps_split_copies: bool  # whether copies of a row that several trained are worth keeping

    def step(self, step: Step) -> Outcome:
        """Plan the moves of one iteration and bring the states to its end."""
        ...


class MoveBuffer:
    """Room for the moves of an iteration, used again by the next."""

    def __init__(self) -> None:
        self._moves: npt.NDArray[Any] = np.zeros(0, MOVE)

    def at_least(self, most: int) -> npt.NDArray[Any]:
        """An array for at least so many moves."""
        if len(self._moves) < most:
            self._moves = np.zeros(most + most // 4, MOVE)
        return self._moves

    def first(self, count: int) -> Moves:
        """The first moves, copied out."""
        return Moves(*columns(self._moves, count))
