"""The rows that a rank holds: a worker's cache, or a store's shard, with the gradients that wait in it.

Both are the same memory with the same operations; a rank that stores and trains has one of each.
Payloads are put into, and taken out of, the buffers that travel; steps on split rows sum the
gradients of several workers in rank order, the same wherever they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import RowhaulError
from rowhaul.exchange.transport import Bytes
from rowhaul.exchange.turns import DueSteps, Parcels
from rowhaul.optim import RowOptimizerRule
from rowhaul.schedule.plan import Payload
from rowhaul.schedule.sizes import RowSizes
from rowhaul.store import TableGroup, TableSpec
from rowhaul.store.kernels import add_records
from rowhaul.store.keyed import Shelf, copy_in, copy_out, locate, locate_or_add, remove

Ints = npt.NDArray[np.int64]
Rates = Callable[[int], float]
"""The learning rate of rows in an iteration, counted from 0; the same on every rank."""

VALUES, STATE, GRADIENT = int(Payload.VALUES), int(Payload.STATE), int(Payload.GRADIENT)


class MissingRowError(RowhaulError):
    """A row is not where the plan says: a defect of Rowhaul, found before anything wrong was learned."""


@dataclass(frozen=True)
class TableLayout:
    """What every rank knows of the tables, in the order that plans number them."""

    specs: tuple[TableSpec, ...]
    optimizer: RowOptimizerRule
    dtype: str
    seed: int

    def sizes(self) -> RowSizes:
        """Bytes of a row of each table."""
        size = np.dtype(self.dtype).itemsize
        dims = [spec.dim for spec in self.specs]
        states = [self.optimizer.state_width(dim) for dim in dims]
        return RowSizes(tuple(dim * size for dim in dims), tuple(width * size for width in states))

    def groups(self) -> list[TableGroup]:
        """Empty tables, those of one row size together."""
        dims = dict.fromkeys(spec.dim for spec in self.specs)
        together = [[spec for spec in self.specs if spec.dim == dim] for dim in dims]
        return [TableGroup(specs, self.optimizer, self.dtype, self.seed) for specs in together]


class RowMemory:
    """Records by (table, key), and gradients by (worker, table, key).

    Args:
        layout: the tables.
        groups: where the records are; those of a collection, or none for memory of its own.
        makes_rows: whether a row that is asked for and not there is made with its first values (a
            home does; in a cache it would be a mistake).
    """

    def __init__(
        self, layout: TableLayout, groups: Sequence[TableGroup] | None = None, *, makes_rows: bool = True
    ) -> None:
        self.layout = layout
        self.groups = list(groups) if groups is not None else layout.groups()
        self.makes_rows = makes_rows
        self._group_of = np.empty(len(layout.specs), np.int64)
        self._position_of = np.empty(len(layout.specs), np.int64)
        places = {
            spec.name: (number, position)
            for number, group in enumerate(self.groups)
            for position, spec in enumerate(group.tables)
        }
        for table, spec in enumerate(layout.specs):
            self._group_of[table], self._position_of[table] = places[spec.name]
        self._shelves: dict[tuple[int, int], Shelf] = {}

    def by_group(self, tables: npt.NDArray[Any]) -> Iterator[tuple[int, Ints, Ints]]:
        """The places of rows whose records are together: group, places, position of each one's table."""
        group = self._group_of[tables]
        for number in range(len(self.groups)):
            places = np.flatnonzero(group == number)
            if len(places):
                yield number, places, self._position_of[tables[places]]

    def place_of(self, table: int) -> tuple[int, int]:
        """The group that a table's rows are in, and the table's position there."""
        return int(self._group_of[table]), int(self._position_of[table])

    def find(self, number: int, positions: Ints, keys: Ints) -> Ints:
        """Where rows of a group are: there, or made where this memory makes rows."""
        group = self.groups[number]
        locations = locate(group, positions, keys)
        absent = np.flatnonzero(locations < 0)
        if not len(absent):
            return locations
        if not self.makes_rows:
            spec = group.tables[int(positions[absent[0]])]
            raise MissingRowError(
                f"{len(absent)} rows are not in the cache where the plan has them, first key "
                f"{int(keys[absent[0]])} of table {spec.name!r}; please report this"
            )
        distinct = np.unique(np.stack([positions[absent], keys[absent]]), axis=1)
        group.make_fresh(np.ascontiguousarray(distinct[0]), np.ascontiguousarray(distinct[1]))
        return locate(group, positions, keys)

    def pack(
        self,
        parcels: Parcels,
        chosen: npt.NDArray[np.bool_],
        worker: int,
        out: Bytes,
        *,
        keep: bool = False,
    ) -> None:
        """Write the chosen payloads into the buffer.

        Gradients, which are those of ``worker``, leave their shelf unless they are to be kept.
        """
        chosen_places = np.flatnonzero(chosen)
        for number, some, positions in self.by_group(parcels.table[chosen_places]):
            places = chosen_places[some]
            keys, offsets = parcels.key[places], parcels.offsets[places]
            lengths = self._record_lengths(number, parcels.payload[places])
            has_record = np.flatnonzero(lengths)
            if len(has_record):
                locations = self.find(number, positions[has_record], keys[has_record])
                copy_out(self.groups[number], locations, lengths[has_record], offsets[has_record], out)
            has_gradient = np.flatnonzero(parcels.payload[places] & GRADIENT)
            if len(has_gradient):
                rows = positions[has_gradient], keys[has_gradient]
                self._take_gradients(number, *rows, worker, (offsets + lengths)[has_gradient], out, keep)

    def unpack(self, parcels: Parcels, chosen: npt.NDArray[np.bool_], given: Bytes) -> None:
        """Take in the chosen payloads: records replace those held, gradients wait by worker."""
        chosen_places = np.flatnonzero(chosen)
        for number, some, positions in self.by_group(parcels.table[chosen_places]):
            places = chosen_places[some]
            keys, offsets, payload = parcels.key[places], parcels.offsets[places], parcels.payload[places]
            lengths = self._record_lengths(number, payload)
            has_record = np.flatnonzero(lengths)
            if len(has_record):
                group = self.groups[number]
                locations, _ = locate_or_add(group, positions[has_record], keys[has_record])
                copy_in(group, locations, lengths[has_record], offsets[has_record], given)
            gradient = (payload & GRADIENT) != 0
            for worker in np.unique(parcels.source[places][gradient]).tolist():
                here = np.flatnonzero(gradient & (parcels.source[places] == worker))
                shelf = self.shelf(worker, number)
                locations, _ = locate_or_add(shelf, positions[here], keys[here])
                width = np.full(len(here), shelf.arena.record_bytes)
                copy_in(shelf, locations, width, (offsets + lengths)[here], given)

    def step(self, steps: DueSteps, rates: Rates, iteration: int | None = None) -> None:
        """Sum the gradients of each row in rank order and apply one optimizer step.

        The learning rate is that of the iteration that the gradients are from, or of ``iteration``.
        """
        for number, places, positions in self.by_group(steps.table):
            group, keys = self.groups[number], steps.key[places]
            locations = self.find(number, positions, keys)
            sums = self._summed(number, positions, keys, steps.contributors[places])
            trained = steps.trained[places] if iteration is None else np.full(len(places), iteration)
            self.apply(group, locations, sums, trained, rates)

    def apply(
        self,
        group: TableGroup,
        locations: Ints,
        gradients: npt.NDArray[Any],
        trained: npt.NDArray[Any],
        rates: Rates,
    ) -> None:
        """One optimizer step a record, each with the rate and number of the iteration it belongs to."""
        alike: dict[tuple[float, ...], list[int]] = {}
        for iteration in np.unique(trained).tolist():
            settings = group.optimizer.settings(rates(iteration), iteration + 1)
            alike.setdefault(settings, []).append(iteration)
        for iterations in alike.values():
            rate, number = rates(iterations[0]), iterations[0] + 1
            if len(alike) == 1:
                group.update(locations, gradients, rate, number)
            else:
                some = np.flatnonzero(np.isin(trained, iterations))
                group.update(locations[some], np.ascontiguousarray(gradients[some]), rate, number)

    def shelve(
        self,
        number: int,
        positions: Ints,
        keys: Ints,
        worker: int,
        gradients: npt.NDArray[Any],
        *,
        accumulate: bool = False,
    ) -> None:
        """Keep gradients of a worker until they are handed in; accumulated where several may wait."""
        shelf = self.shelf(worker, number)
        locations, added = locate_or_add(shelf, positions, keys)
        if accumulate and len(added) < len(keys):
            old = np.ones(len(keys), np.bool_)
            old[added] = False
            gradients = gradients.copy()
            gradients[old] = shelf.arena.read(locations[old]) + gradients[old]
        shelf.arena.write(locations, gradients)

    def remove(self, tables: npt.NDArray[Any], keys: Ints) -> None:
        """Forget records."""
        for number, places, positions in self.by_group(tables):
            remove(self.groups[number], positions, keys[places])

    def make(self, tables: npt.NDArray[Any], keys: Ints) -> None:
        """Have rows that may never have been trained; new ones get their first values."""
        for number, places, positions in self.by_group(tables):
            self.groups[number].make_fresh(positions, keys[places])

    def shelf(self, worker: int, number: int) -> Shelf:
        """Where the gradients of a worker wait, of the tables of a group."""
        if (worker, number) not in self._shelves:
            group = self.groups[number]
            self._shelves[worker, number] = Shelf(len(group.tables), group.dim, group.dtype)
        return self._shelves[worker, number]

    @property
    def num_waiting(self) -> int:
        """Gradients that wait here."""
        return sum(int(shelf.index.num_keys.sum()) for shelf in self._shelves.values())

    def _record_lengths(self, number: int, payload: npt.NDArray[np.uint8]) -> Ints:
        group = self.groups[number]
        values = group.dim * group.dtype.itemsize
        lengths = np.where(payload & STATE, group.arena.record_bytes, values)
        return np.where(payload & VALUES, lengths, 0)

    def _take_gradients(
        self, number: int, positions: Ints, keys: Ints, worker: int, offsets: Ints, out: Bytes, keep: bool
    ) -> None:
        shelf = self.shelf(worker, number)
        locations = self._on_shelf(shelf, number, positions, keys)
        copy_out(shelf, locations, np.full(len(keys), shelf.arena.record_bytes), offsets, out)
        if not keep:
            remove(shelf, positions, keys)

    def _summed(
        self, number: int, positions: Ints, keys: Ints, contributors: npt.NDArray[np.uint64]
    ) -> npt.NDArray[Any]:
        """The gradients of rows, added up from worker 0 on; they leave their shelves."""
        group = self.groups[number]
        sums = np.zeros((len(keys), group.dim), group.dtype)
        everyone = int(np.bitwise_or.reduce(contributors)) if len(contributors) else 0
        for worker in (j for j in range(everyone.bit_length()) if everyone >> j & 1):
            rows = np.flatnonzero((contributors >> np.uint64(worker)) & np.uint64(1))
            shelf = self.shelf(worker, number)
            locations = self._on_shelf(shelf, number, positions[rows], keys[rows])
            add_records(shelf.arena.addresses, shelf.arena.shift, locations, rows, sums)
            remove(shelf, positions[rows], keys[rows])
        return sums

    def _on_shelf(self, shelf: Shelf, number: int, positions: Ints, keys: Ints) -> Ints:
        locations = locate(shelf, positions, keys)
        absent = np.flatnonzero(locations < 0)
        if len(absent):
            spec = self.groups[number].tables[int(positions[absent[0]])]
            raise MissingRowError(
                f"{len(absent)} gradients are not where the plan has them, first of key "
                f"{int(keys[absent[0]])} of table {spec.name!r}; please report this"
            )
        return locations
