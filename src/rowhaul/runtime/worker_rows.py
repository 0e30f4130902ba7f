"""What a worker does with the gradients of its rows: step, keep for the home, or share with all.

A row that it trains alone is stepped in its cache. Of a row that others train too it has a part of the
gradient, which waits until it is handed in. Rows that all workers hold get the sum of all parts, and
every worker takes the same step. Rows that are not admitted yet learn nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ConfigError
from rowhaul.nn import EmbeddingBagCollection
from rowhaul.nn.pooled import FeatureGroup, tables_of_keys
from rowhaul.runtime.batch_rows import BatchRows
from rowhaul.runtime.mover import TrainedRows
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.store import Lookup

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]


class WorkerRows:
    """The rows of a worker's collection in training."""

    def __init__(
        self, collection: EmbeddingBagCollection, cache: RowMemory, rates: Rates, *, bounded: bool
    ) -> None:
        self._groups = collection.groups
        self._cache, self._rates, self._bounded = cache, rates, bounded

    def expect(self, rows: Sequence[BatchRows]) -> None:
        """Tell the collection which rows the batch that comes next reads, and where they are."""
        for group in self._groups:
            group.known = None
        for part in rows:
            if part.all_admitted and len(part):
                self._groups[part.number].known = part.rows

    def take(self, iteration: int, rows: Sequence[BatchRows]) -> TakenGradients:
        """Everything that backward left, sorted out as the rows are."""
        parts = []
        for part in rows:
            if len(part):
                lookup, gradients = _gradients_of(self._groups[part.number], len(part))
                if lookup.keys is not part.rows.keys:
                    gradients = gradients[_matched(part, lookup)]
            else:
                gradients = np.empty((0, self._cache.groups[part.number].dim))
            parts.append((part, gradients))
        for group in self._groups:
            group.pending.clear()
            group.known = None
        return TakenGradients(iteration, parts)

    def step_own(self, taken: TakenGradients) -> TrainedRows:
        """Step the rows that nobody else trained; returns the gradients that are to be handed in."""
        handed_in = []
        for part, gradients in taken.parts:
            rows, handed = part.rows, part.own if self._bounded else part.shared
            self._step(taken.iteration, part.number, rows.locations[part.own], gradients[part.own])
            if handed.start < handed.stop:
                handed_in.append((part.number, rows.tables[handed], rows.keys[handed], gradients[handed]))
        return TrainedRows(handed_in)

    def step_replicated(self, taken: TakenGradients, summed: Floats) -> None:
        """Step the rows that all workers hold by the sum of their gradients, as every worker does."""
        first = 0
        for part, gradients in taken.parts:
            count, dim = len(part.replicated_locations), gradients.shape[1]
            some = summed[first : first + count * dim].reshape(count, dim)
            self._step(taken.iteration, part.number, part.replicated_locations, some)
            first += count * dim

    def _step(self, iteration: int, number: int, locations: Ints, gradients: Floats) -> None:
        if len(locations):
            self._cache.groups[number].update(locations, gradients, self._rates(iteration), iteration + 1)


class TakenGradients:
    """The gradients of one iteration on one worker: those of each group's rows, in the order of the rows."""

    def __init__(self, iteration: int, parts: list[tuple[BatchRows, Floats]]) -> None:
        self.iteration, self.parts = iteration, parts
        # Elements of all replicated rows of the batch, whoever trains them.
        self.replicated_size = sum(
            len(part.replicated_locations) * gradients.shape[1] for part, gradients in parts
        )

    def write_replicated(self, out: Floats) -> None:
        """Write this worker's part of the gradients of replicated rows; zeros where it trained none."""
        out[:] = 0
        first = 0
        for part, gradients in self.parts:
            count, dim = len(part.replicated_locations), gradients.shape[1]
            block = out[first : first + count * dim].reshape(count, dim)
            if len(part.replicated_here):
                block[part.replicated_here] = gradients[part.replicated]
            first += count * dim


def _gradients_of(group: FeatureGroup, num_rows: int) -> tuple[Lookup, Floats]:
    taken = group.take_gradients()
    if taken is None:
        raise ConfigError(
            f"{num_rows:,} rows of this worker have no gradient; call backward() on the loss of the batch "
            "that was dispatched, then step()"
        )
    return taken


def _matched(part: BatchRows, lookup: Lookup) -> Ints:
    """Where each row of the plan is among those that the model has read, in an order of its own."""
    rows, tables = part.rows, tables_of_keys(lookup)
    ours, theirs = np.lexsort((rows.keys, rows.tables)), np.lexsort((lookup.keys, tables))
    if (
        len(ours) != len(theirs)
        or (rows.keys[ours] != lookup.keys[theirs]).any()
        or (rows.tables[ours] != tables[theirs]).any()
    ):
        raise ConfigError(
            f"the model has read {len(theirs):,} rows, but the batch that was dispatched to this worker has "
            f"{len(ours):,} others; train on the dispatched batch, and on nothing else, between two steps"
        )
    places = np.empty(len(ours), np.int64)
    places[ours] = theirs
    return places
