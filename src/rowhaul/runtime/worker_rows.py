"""`CachedRows`: a worker's rows as the model reads them, and what becomes of their gradients.

A row that the worker trains alone is stepped in its cache. Of a row that others train too it has a partial
gradient, which is buffered until a plan asks for it. Replicated rows get the sum of all workers' gradients,
and every worker takes the same step. Rows that are not admitted learn nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from rowhaul.errors import ConfigError
from rowhaul.nn.features import FeatureGroup
from rowhaul.nn.local_rows import TableRows, tables_of_keys
from rowhaul.nn.row_source import Arrays, RowGradients
from rowhaul.runtime.batch_rows import BatchRows
from rowhaul.runtime.mover import TrainedRows
from rowhaul.runtime.row_memory import Rates, RowMemory
from rowhaul.schedule.plan import Plan
from rowhaul.store import Lookup, TableGroup
from rowhaul.store.distinct import KnownRows, match_keys
from rowhaul.store.packing import RowNames

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[Any]


class CachedRows(TableRows):
    """The row source of a worker, whose cache changes as its plans say.

    Args:
        groups: the features.
        cache: the worker's cache.
        rates: the rows' learning rate by iteration.
        bounded: whether the worker steps its copy of every row, as with bounded staleness.
        tables: the tables that features look up their ids in; the cache's by default.
    """

    def __init__(
        self,
        groups: Sequence[FeatureGroup],
        cache: RowMemory,
        rates: Rates,
        *,
        bounded: bool = False,
        tables: Sequence[TableGroup] | None = None,
    ) -> None:
        super().__init__(groups, cache.groups if tables is None else tables)
        self._cache, self._rates, self._bounded = cache, rates, bounded
        self._known: list[KnownRows | None] = [None] * len(groups)  # rows of the batch that is read next

    def expect(self, plan: Plan, rows: Sequence[BatchRows]) -> None:
        """Prepare for the batch of a plan, whose rows are in the cache."""
        self._known = [None] * len(self.groups)
        for part in rows:
            if part.all_admitted and len(part):
                self._known[part.number] = part.rows

    def look_up(self, number: int, ids: tuple[Ints, Ints, Ints], training: bool, on_unknown: str) -> Lookup:
        """Match ids with the rows of the plan; for another batch, look them up in the cache."""
        known, tables = self._known[number], self.tables[number]
        if known is not None:
            lookup = match_keys(known, *ids, np.empty((0, tables.dim), tables.dtype))
            if lookup is not None:
                return lookup
        return super().look_up(number, ids, training, on_unknown)

    def replicated_size(self, rows: Sequence[BatchRows]) -> int:
        """Elements of all replicated rows of a batch."""
        return sum(len(part.replicated_locations) * self._cache.groups[part.number].dim for part in rows)

    def take(self, iteration: int, rows: Sequence[BatchRows]) -> TakenGradients:
        """Take the gradients of backward, in the order of the plan's rows."""
        parts = []
        for part in rows:
            if len(part):
                taken = self.take_gradients(part.number)
                if taken is None:
                    raise ConfigError(
                        f"{len(part):,} rows of this worker have no gradient; call backward() on the loss of "
                        "the batch that was dispatched, then step()"
                    )
                lookup, gradients = taken
                if lookup.keys is not part.rows.keys:
                    gradients = gradients[_matched(part, lookup)]
            else:
                gradients = np.empty((0, self._cache.groups[part.number].dim))
            parts.append((part, gradients))
        self.drop_gradients()
        self._known = [None] * len(self.groups)
        return TakenGradients(iteration, parts)

    def step_own(self, taken: TakenGradients, worker: int) -> TrainedRows:
        """Step the rows that only this worker trained; return the gradients to buffer."""
        buffered = []
        for part, gradients in taken.parts:
            rows, shared = part.rows, part.own if self._bounded else part.shared
            names = RowNames(rows.tables[part.own], rows.keys[part.own])
            own = gradients[part.own]
            if self._bounded:
                own = self._as_sent(taken.iteration, part.number, own, names, worker)
            self._step(taken.iteration, part.number, rows.locations[part.own], own, names)
            if shared.start < shared.stop:
                buffered.append((part.number, rows.tables[shared], rows.keys[shared], gradients[shared]))
        return buffered

    def step_replicated(self, taken: TakenGradients, summed: Floats) -> None:
        """Step replicated rows by the sum of all workers' gradients, as every worker does."""
        first = 0
        for part, gradients in taken.parts:
            count, dim = len(part.replicated_locations), gradients.shape[1]
            some = summed[first : first + count * dim].reshape(count, dim)
            self._step(taken.iteration, part.number, part.replicated_locations, some, part.replicated_names)
            first += count * dim

    def _as_sent(self, iteration: int, number: int, gradients: Floats, rows: RowNames, worker: int) -> Floats:
        """Round gradients as they will be sent: the worker's copy of a row steps as its home does."""
        group = self._cache.groups[number]
        return group.unpack_gradients(group.pack_gradients(gradients, rows, iteration + 1, worker))

    def _step(self, iteration: int, number: int, locations: Ints, gradients: Floats, rows: RowNames) -> None:
        if len(locations):
            rate = self._rates(iteration)
            self._cache.groups[number].update(locations, gradients, rate, iteration + 1, rows)

    def step(self, lr: float, number: int) -> None:
        """Refuse: other ranks take part in the step."""
        raise ConfigError(
            "on a cluster training.step() steps the rows, together with the other ranks; leave out "
            "RowOptimizer.step()"
        )

    def num_rows(self, table: str) -> int:
        """Refuse: a cache holds some of the rows."""
        self._refuse("num_rows()", "training.held() counts the rows of all ranks")

    def rows(self, table: str) -> Iterator[tuple[Ints, Floats]]:
        """Refuse: a cache holds some of the rows."""
        self._refuse("rows()", _SAVE)

    def load_rows(self, table: str, keys: Ints, records: Floats) -> None:
        """Refuse: each row belongs on the rank that stores it."""
        self._refuse("load_rows()", "load them in one process, save a checkpoint, and resume from it here")

    def clear(self) -> None:
        """Refuse: other ranks hold rows, too."""
        self._refuse("clear()", "start training anew on all ranks")

    def state_names(self) -> list[str]:
        """Refuse: each row belongs on the rank that stores it."""
        self._refuse("load_state_dict()", "resume from a checkpoint")

    def state(self) -> Arrays:
        """Refuse: a cache holds some of the rows."""
        self._refuse("state_dict()", _SAVE)

    def load_state(self, arrays: Arrays) -> None:
        """Refuse: each row belongs on the rank that stores it."""
        self.state_names()

    def _refuse(self, call: str, instead: str) -> NoReturn:
        raise ConfigError(f"{call} on a worker of a cluster would see the rows of one cache only; {instead}")


_SAVE = (
    "rowhaul.train.distributed.save_checkpoint writes all of them, and `rowhaul export` turns that into "
    "plain files; for the dense weights alone use model.named_parameters()"
)


class TakenGradients:
    """The gradients of one iteration on one worker: those of each group's rows, in the order of the rows."""

    def __init__(self, iteration: int, parts: list[tuple[BatchRows, Floats]]) -> None:
        self.iteration, self.parts = iteration, parts

    def named(self, cache: RowMemory) -> list[RowGradients]:
        """The gradients with the names of their tables."""
        return [
            RowGradients(part.rows.keys, gradients, partial(_table_of_row, cache, part))
            for part, gradients in self.parts
            if len(part)
        ]

    def write_replicated(self, out: Floats) -> None:
        """Write this worker's part of the gradients of replicated rows; zeros where it trained none."""
        out[:] = 0
        first = 0
        for part, gradients in self.parts:
            count, dim = len(part.replicated_locations), gradients.shape[1]
            block = out[first : first + count * dim].reshape(count, dim)
            if len(part.replicated_here):
                # They may be on a card.
                block[part.replicated_here] = torch.as_tensor(gradients[part.replicated]).cpu().numpy()
            first += count * dim


def _table_of_row(cache: RowMemory, part: BatchRows, place: int) -> str:
    return cache.groups[part.number].tables[int(part.rows.tables[place])].name


def _matched(part: BatchRows, lookup: Lookup) -> Ints:
    """Find each row of the plan among those that the model has read, in an order of its own."""
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
