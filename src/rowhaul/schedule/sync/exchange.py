"""The seam between the scheduler and the synchronisation modes: an iteration in, its moves out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.schedule.arrays import Arrays, Saved
from rowhaul.schedule.plan import Moves, Steps
from rowhaul.schedule.sizes import RowSizes
from rowhaul.schedule.topology import Topology

NAMES = ("on-demand", "full", "bounded:S", "static", "at-home")


@dataclass(frozen=True)
class SyncMode:
    """When a trained row goes home.

    ``on-demand``: when another worker needs it or a cache has no room for it. ``full``: at once.
    ``bounded``: when more than ``staleness`` updates wait; readers tolerate as many (inexact).
    ``static``: replicated rows are all-reduced, all others pulled and pushed in every iteration.
    ``at-home``: never; ranks read rows at their homes and hand gradients over, without a plan.
    """

    name: str
    staleness: int = 0

    @property
    def caches_rows(self) -> bool:
        """Whether rows stay on workers between iterations."""
        return self.name not in ("static", "at-home")

    @property
    def plans_rows(self) -> bool:
        """Whether plans say which rows move; otherwise only who trains which sample."""
        return self.name != "at-home"


def make_sync(text: str) -> SyncMode:
    """The mode of a name such as ``"on-demand"`` or ``"bounded:2"``."""
    name, _, value = text.partition(":")
    if name == "bounded" and value.isdecimal():
        return SyncMode(name, int(value))
    if name in ("on-demand", "full", "static", "at-home") and not value:
        return SyncMode(name)
    if name == "bounded":
        raise ConfigError(f"bounded staleness is 'bounded:S' with S = 0, 1, 2, ... updates; got {text!r}")
    raise ConfigError(f"unknown synchronisation {text!r}; known are {', '.join(NAMES)}")


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
        self.summed_bytes = np.array(sizes.summed, np.int64)  # tables


@dataclass(frozen=True)
class Step:
    """One iteration as the modes see it: trained rows and evicted copies, by their slots."""

    iteration: int
    slots: npt.NDArray[Any]  # the directory's, changed in place
    rows: npt.NDArray[np.int32]  # slots of the batch's rows, ordered by (table, key)
    trainers: npt.NDArray[np.uint64]  # rows: who trains each
    evicted_from: npt.NDArray[np.int16]  # evictions: the worker
    victims: npt.NDArray[np.int32]  # evictions: the slot
    edges: npt.NDArray[np.int64]  # chunks + 1: where chunks of rows begin
    most_moves: npt.NDArray[np.int64]  # chunks: a bound on the moves that their rows can cause


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

    def owing(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        """The workers that hold updates of these rows, beyond what row states say, that the home lacks."""

    def forget(self, slots: npt.NDArray[np.int32]) -> None:
        """Drop what is known of the rows in these slots beyond their states."""

    def export(self, slots: npt.NDArray[np.int32]) -> Arrays:
        """Export what the mode knows of the rows in these slots (all of them) beyond the directory."""

    def restore(self, saved: Saved, slots: npt.NDArray[np.int32]) -> None:
        """Restore what `export` returned, before anything is planned."""


class DirectoryKnowsAll:
    """The part of `Exchange` of modes that know nothing beyond the directory."""

    def owing(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
        """See `Exchange`."""
        return np.zeros(len(slots), np.uint64)

    def forget(self, slots: npt.NDArray[np.int32]) -> None:
        """See `Exchange`."""

    def export(self, slots: npt.NDArray[np.int32]) -> Arrays:
        """See `Exchange`."""
        return {}

    def restore(self, saved: Saved, slots: npt.NDArray[np.int32]) -> None:
        """See `Exchange`."""
