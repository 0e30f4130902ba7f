"""What a worker does with the gradients of its rows: step, keep for the home, or share with all.

A row that it trains alone is stepped in its cache. Of a row that others train too it has a part of the
gradient, which waits until it is handed in. Rows that all workers hold get the sum of all parts, and
every worker takes the same step. Rows that are not admitted yet learn nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.exchange.kernels import rows_of_worker
from rowhaul.exchange.mover import TrainedRows
from rowhaul.exchange.rows import Rates, RowMemory
from rowhaul.nn import EmbeddingBagCollection
from rowhaul.nn.pooled import FeatureGroup
from rowhaul.schedule.directory.states import State
from rowhaul.schedule.plan import Plan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class _GroupGradients:
    """The gradients of one group's rows, ordered as the plan has the rows."""

    number: int
    positions: Ints  # of the table, in the group
    keys: Ints
    locations: Ints
    gradients: Floats
    alone: npt.NDArray[np.bool_]
    states: npt.NDArray[np.uint8]

    def some(self, chosen: npt.NDArray[np.bool_]) -> tuple[int, Ints, Ints, Floats]:
        """Those chosen, as a mover takes them."""
        return self.number, self.positions[chosen], self.keys[chosen], self.gradients[chosen]


class WorkerRows:
    """The rows of a worker's collection in training."""

    def __init__(
        self,
        collection: EmbeddingBagCollection,
        cache: RowMemory,
        worker: int,
        rates: Rates,
        *,
        bounded: bool,
    ) -> None:
        self._groups = collection.groups
        self._cache, self._worker, self._rates, self._bounded = cache, worker, rates, bounded

    def take(self, plan: Plan) -> TakenGradients:
        """Everything that backward left, sorted out by the plan."""
        rows, alone = rows_of_worker(plan.trainers, self._worker)
        tables, keys, states = plan.tables[rows], plan.keys[rows], plan.states[rows]
        parts = []
        for number, places, positions in self._cache.by_group(tables):
            found = _sorted_gradients(self._groups[number], positions, keys[places])
            parts.append(
                _GroupGradients(number, positions, keys[places], *found, alone[places], states[places])
            )
        for group in self._groups:
            group.pending.clear()
        return TakenGradients(plan, parts, self._cache)

    def step_own(self, taken: TakenGradients) -> TrainedRows:
        """Step the rows that nobody else trained; returns the gradients that are to be handed in."""
        plan, handed_in = taken.plan, []
        for part in taken.parts:
            moving = (part.states != State.REPLICATED) & (part.states != State.NOT_ADMITTED)
            own = moving if self._bounded else moving & part.alone
            self._step(plan, part.number, part.locations[own], part.gradients[own])
            waiting = moving if self._bounded else moving & ~part.alone
            if waiting.any():
                handed_in.append(part.some(waiting))
        return TrainedRows(handed_in)

    def step_replicated(self, taken: TakenGradients, summed: Floats) -> None:
        """Step the rows that all workers hold by the sum of their gradients, as every worker does."""
        for number, positions, keys, where in taken.replicated():
            locations = self._cache.find(number, positions, keys)
            dim = self._cache.groups[number].dim
            gradients = summed[where : where + len(keys) * dim].reshape(len(keys), dim)
            self._step(taken.plan, number, locations, np.ascontiguousarray(gradients))

    def _step(self, plan: Plan, number: int, locations: Ints, gradients: Floats) -> None:
        if len(locations):
            lr = self._rates(plan.iteration)
            self._cache.groups[number].update(locations, gradients, lr, plan.iteration + 1)


class TakenGradients:
    """The gradients of one iteration on one worker."""

    def __init__(self, plan: Plan, parts: list[_GroupGradients], cache: RowMemory) -> None:
        self.plan, self.parts = plan, parts
        chosen = plan.states == State.REPLICATED
        tables, keys = plan.tables[chosen], plan.keys[chosen]
        self._replicated: list[tuple[int, Ints, Ints, int]] = []
        self.replicated_size = 0  # elements of all replicated rows of the batch, whoever trains them
        for number, places, positions in cache.by_group(tables):
            self._replicated.append((number, positions, keys[places], self.replicated_size))
            self.replicated_size += len(places) * cache.groups[number].dim

    def replicated(self) -> list[tuple[int, Ints, Ints, int]]:
        """The replicated rows of the batch: group, position of the table, key; and where they begin."""
        return self._replicated

    def write_replicated(self, out: Floats) -> None:
        """Write this worker's part of the gradients of replicated rows; zeros where it trained none."""
        out[:] = 0
        mine = {part.number: part for part in self.parts}
        for number, positions, keys, first in self._replicated:
            part = mine.get(number)
            if part is None:
                continue
            here = part.states == State.REPLICATED
            rows = np.stack([positions, keys])
            own = np.stack([part.positions[here], part.keys[here]])
            # Both are ordered by (table, key), and a worker's rows are among the batch's.
            places = np.flatnonzero(_among(rows, own))
            dim = part.gradients.shape[1]
            block = out[first : first + len(keys) * dim].reshape(len(keys), dim)
            block[places] = part.gradients[here]


def _among(rows: Ints, own: Ints) -> npt.NDArray[np.bool_]:
    order = np.lexsort((np.concatenate([rows[1], own[1]]), np.concatenate([rows[0], own[0]])))
    every = np.concatenate([rows, own], axis=1)[:, order]
    repeated = np.zeros(len(order), np.bool_)
    repeated[:-1] = (every[:, 1:] == every[:, :-1]).all(axis=0)
    found = np.zeros(len(order), np.bool_)
    found[order] = repeated | np.concatenate([[False], repeated[:-1]])
    return found[: rows.shape[1]]


def _sorted_gradients(group: FeatureGroup, positions: Ints, keys: Ints) -> tuple[Ints, Floats]:
    """A group's locations and gradients in the order of the plan's rows, which they must be."""
    taken = group.take_gradients()
    if taken is None:
        raise ConfigError(
            f"{len(keys):,} rows of this worker have no gradient; call backward() on the loss of the batch "
            "that was dispatched, then step()"
        )
    lookup, gradients = taken
    table = np.repeat(np.arange(len(lookup.starts) - 1), np.diff(lookup.starts))
    order = np.lexsort((lookup.keys, table))
    if len(order) != len(keys) or (lookup.keys[order] != keys).any() or (table[order] != positions).any():
        raise ConfigError(
            f"the model has read {len(order):,} rows, but the batch that was dispatched to this worker has "
            f"{len(keys):,} others; train on the dispatched batch, and on nothing else, between two steps"
        )
    return lookup.locations[order], gradients[order]
