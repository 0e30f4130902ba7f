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
from rowhaul.store import Lookup

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class _GroupGradients:
    """The gradients of one group's rows, in the order in which the model has read them."""

    number: int
    positions: Ints  # of the table, in the group
    keys: Ints
    locations: Ints  # negative: a row that is not admitted
    gradients: Floats
    rows: Ints  # place of each among the rows of the plan
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
        # By group: from a record's number to its row's place in the plan; only what was just written counts.
        self._places = [np.empty(0, np.int32) for _ in self._groups]

    def take(self, plan: Plan) -> TakenGradients:
        """Everything that backward left, sorted out by the plan."""
        rows, alone = rows_of_worker(plan.trainers, self._worker)
        parts = []
        for number, places, positions in self._cache.by_group(plan.tables[rows]):
            some = rows[places]
            parts.append(self._part(number, plan, some, positions, alone[places]))
        for group in self._groups:
            group.pending.clear()
        return TakenGradients(plan, parts, self._cache)

    def _part(
        self, number: int, plan: Plan, rows: Ints, positions: Ints, alone: npt.NDArray[np.bool_]
    ) -> _GroupGradients:
        """The gradients of a group, matched with the rows of the plan that this worker trains."""
        lookup, gradients = _gradients_of(self._groups[number], len(rows))
        keys, states = plan.keys[rows], plan.states[rows]
        admitted = states != State.NOT_ADMITTED
        if len(lookup.keys) != len(rows) or int((lookup.locations >= 0).sum()) != int(admitted.sum()):
            raise _other_rows(len(lookup.keys), len(rows))
        table = np.repeat(np.arange(len(lookup.starts) - 1), np.diff(lookup.starts))
        if admitted.all():
            places = self._matched(number, positions, keys, lookup.locations)
        else:  # some have no record to be found by
            places = np.empty(len(rows), np.int64)
            places[np.lexsort((lookup.keys, table))] = np.arange(len(rows))
        if (keys[places] != lookup.keys).any() or (positions[places] != table).any():
            raise _other_rows(len(lookup.keys), len(rows))
        return _GroupGradients(
            number,
            table,
            lookup.keys,
            lookup.locations,
            gradients,
            rows[places],
            alone[places],
            states[places],
        )

    def _matched(self, number: int, positions: Ints, keys: Ints, locations: Ints) -> Ints:
        """Where each record that was read is among the plan's rows: by its number, without sorting."""
        planned = self._cache.find(number, positions, keys)
        most = max(int(planned.max()), int(locations.max())) + 1
        if len(self._places[number]) < most:
            self._places[number] = np.zeros(2 * most, np.int32)
        scratch = self._places[number]
        scratch[planned] = np.arange(len(planned), dtype=np.int32)
        return np.minimum(scratch[locations], len(planned) - 1).astype(np.int64)

    def step_own(self, taken: TakenGradients) -> TrainedRows:
        """Step the rows that nobody else trained; returns the gradients that are to be handed in."""
        plan, handed_in = taken.plan, []
        for part in taken.parts:
            moving = (part.states != State.REPLICATED) & (part.states != State.NOT_ADMITTED)
            own = moving if self._bounded else moving & part.alone
            if own.all():
                self._step(plan, part.number, part.locations, part.gradients)
            else:
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
        chosen = np.flatnonzero(plan.states == State.REPLICATED)
        tables, keys = plan.tables[chosen], plan.keys[chosen]
        self._replicated: list[tuple[int, Ints, Ints, int]] = []
        self._place_of_row = np.zeros(len(plan.keys) if len(chosen) else 0, np.int64)
        self.replicated_size = 0  # elements of all replicated rows of the batch, whoever trains them
        for number, places, positions in cache.by_group(tables):
            self._replicated.append((number, positions, keys[places], self.replicated_size))
            self._place_of_row[chosen[places]] = np.arange(len(places))
            self.replicated_size += len(places) * cache.groups[number].dim

    def replicated(self) -> list[tuple[int, Ints, Ints, int]]:
        """The replicated rows of the batch: group, position of the table, key; and where they begin."""
        return self._replicated

    def write_replicated(self, out: Floats) -> None:
        """Write this worker's part of the gradients of replicated rows; zeros where it trained none."""
        out[:] = 0
        mine = {part.number: part for part in self.parts}
        for number, _, keys, first in self._replicated:
            part = mine.get(number)
            if part is None:
                continue
            here = part.states == State.REPLICATED
            dim = part.gradients.shape[1]
            block = out[first : first + len(keys) * dim].reshape(len(keys), dim)
            block[self._place_of_row[part.rows[here]]] = part.gradients[here]


def _gradients_of(group: FeatureGroup, num_rows: int) -> tuple[Lookup, Floats]:
    taken = group.take_gradients()
    if taken is None:
        raise ConfigError(
            f"{num_rows:,} rows of this worker have no gradient; call backward() on the loss of the batch "
            "that was dispatched, then step()"
        )
    return taken


def _other_rows(num_read: int, num_planned: int) -> ConfigError:
    return ConfigError(
        f"the model has read {num_read:,} rows, but the batch that was dispatched to this worker has "
        f"{num_planned:,} others; train on the dispatched batch, and on nothing else, between two steps"
    )
