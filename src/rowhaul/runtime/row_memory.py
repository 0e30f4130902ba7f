"""The rows that a rank holds: a worker's cache, or a store's shard, with the gradients that wait in it.

Both are the same memory with the same operations; a rank that stores and trains has one of each.
Payloads are put into, and taken out of, the buffers that travel; steps on split rows sum the
gradients of several workers in rank order, the same wherever they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import RowhaulError
from rowhaul.runtime.gradient_buffer import GradientBuffer
from rowhaul.runtime.phase_kernels import pick_gradients, pick_records, pick_rows, rows_of_contributor
from rowhaul.runtime.phases import DueSteps, Kinds, Payloads
from rowhaul.store import TableGroup
from rowhaul.store.keyed import copy_in, copy_out, find_or_add, locate_or_add, remove
from rowhaul.store.records import add_records
from rowhaul.transport.base import Bytes

if TYPE_CHECKING:
    from rowhaul.runtime.layout import TableLayout

Ints = npt.NDArray[np.int64]
Rates = Callable[[int], float]
"""The learning rate of rows in an iteration, counted from 0; the same on every rank."""


_ALL_ROWS = 2**31  # more than a plan can have


class MissingRowError(RowhaulError):
    """A row is not where the plan says: a defect of Rowhaul, found before anything wrong was learned."""


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
        self._buffers: dict[tuple[int, int], GradientBuffer] = {}
        self.num_removals = 0  # calls of `remove`: what was found before must be found again

    def by_group(self, tables: npt.NDArray[Any]) -> Iterator[tuple[int, Ints, Ints]]:
        """The places of rows whose records are together: group, places, position of each one's table."""
        group = self._group_of[tables]
        for number in range(len(self.groups)):
            places = np.flatnonzero(group == number)
            if len(places):
                yield number, places, self._position_of[tables[places]]

    @property
    def places(self) -> tuple[Ints, Ints]:
        """By table: the group that its rows are in, and its position there."""
        return self._group_of, self._position_of

    def place_of(self, table: int) -> tuple[int, int]:
        """The group that a table's rows are in, and the table's position there."""
        return int(self._group_of[table]), int(self._position_of[table])

    def find(self, number: int, keys: Ints, starts: Ints) -> Ints:
        """Where rows of a group, given table by table, are: there, or made where this memory makes rows."""
        group = self.groups[number]
        locations, num_absent = group.index.find(keys, starts)
        if not num_absent.any():
            return locations
        absent = np.flatnonzero(locations < 0)
        positions = np.searchsorted(starts, absent, side="right") - 1
        if not self.makes_rows:
            raise MissingRowError(
                f"{len(absent)} rows are not in the cache where the plan has them, first key "
                f"{keys[absent[0]]} of table {group.tables[int(positions[0])].name!r}; please report this"
            )
        distinct = np.unique(np.stack([positions, keys[absent]]), axis=1)  # several workers may ask for one
        group.make_fresh(np.ascontiguousarray(distinct[0]), np.ascontiguousarray(distinct[1]))
        return group.index.find(keys, starts)[0]

    def pack_records(self, payloads: Payloads, kinds: Kinds, out: Bytes, *, others: bool = False) -> None:
        """Write the records among the payloads of some kinds into the buffer.

        With ``others`` only those of rows that are none of the batch: see `RowLocations` for the rest.
        """
        for number, group in enumerate(self.groups):
            keys, starts, lengths, offsets = self._records_among(number, payloads, kinds, others)
            if len(keys):
                copy_out(group, self.find(number, keys, starts), lengths, offsets, out)

    def pack_gradients(self, payloads: Payloads, kinds: Kinds, out: Bytes, *, keep: bool = False) -> None:
        """Write gradients, which are the sender's, into the buffer; they leave their shelf unless kept."""
        for number in range(len(self.groups)):
            nothing = np.zeros(len(payloads), np.uint8)
            for worker, keys, starts, offsets in self._gradients_among(number, payloads, kinds, nothing):
                buffer = self.buffer(worker, number)
                locations = self.take_gradients_of(worker, number, keys, starts, keep=keep)
                copy_out(buffer, locations, np.full(len(keys), buffer.arena.record_bytes), offsets, out)
                if not keep:
                    buffer.arena.release(locations)

    def unpack_records(self, payloads: Payloads, kinds: Kinds, given: Bytes, *, others: bool = False) -> None:
        """Take in the records among the payloads of some kinds; see `pack_records`."""
        for number, group in enumerate(self.groups):
            keys, starts, lengths, offsets = self._records_among(number, payloads, kinds, others)
            if len(keys):
                locations, _ = find_or_add(group, keys, starts)
                copy_in(group, locations, lengths, offsets, given)

    def unpack_gradients(
        self, payloads: Payloads, kinds: Kinds, given: Bytes, done: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """Let the gradients among the payloads of some kinds wait by worker, but for those that are done."""
        done = np.zeros(len(payloads), np.uint8) if done is None else done
        for number in range(len(self.groups)):
            for worker, keys, starts, offsets in self._gradients_among(number, payloads, kinds, done):
                buffer = self.buffer(worker, number)
                locations, _ = find_or_add(buffer, keys, starts)
                copy_in(buffer, locations, np.full(len(keys), buffer.arena.record_bytes), offsets, given)

    def step(self, steps: DueSteps, rates: Rates, iteration: int | None = None) -> None:
        """Sum the gradients of each row in rank order and apply one optimizer step.

        The learning rate is that of the iteration that the gradients are from, or of ``iteration``.
        """
        for number, group in enumerate(self.groups):
            places, starts = pick_rows(
                steps.table, self._group_of, self._position_of, number, len(group.tables)
            )
            if not len(places):
                continue
            keys = steps.key[places]
            locations = self.find(number, keys, starts)
            sums = self._summed(number, keys, starts, steps.contributors[places])
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
        # Nearly always all are from one iteration, which is told without sorting them.
        one = len(trained) > 0 and trained.min() == trained.max()
        for iteration in [int(trained[0])] if one else np.unique(trained).tolist():
            settings = group.optimizer.settings(rates(iteration), iteration + 1)
            alike.setdefault(settings, []).append(iteration)
        for iterations in alike.values():
            rate, number = rates(iterations[0]), iterations[0] + 1
            if len(alike) == 1:
                group.update(locations, gradients, rate, number)
            else:
                some = np.flatnonzero(np.isin(trained, iterations))
                group.update(locations[some], np.ascontiguousarray(gradients[some]), rate, number)

    def buffer_gradients(
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
        buffer = self.buffer(worker, number)
        locations, added = locate_or_add(buffer, positions, keys)
        if accumulate and len(added) < len(keys):
            old = np.ones(len(keys), np.bool_)
            old[added] = False
            gradients = gradients.copy()
            gradients[old] = buffer.arena.read(locations[old]) + gradients[old]
        buffer.arena.write(locations, gradients)

    def remove(self, tables: npt.NDArray[Any], keys: Ints) -> None:
        """Forget records."""
        for number, places, positions in self.by_group(tables):
            self.remove_of_group(number, positions, keys[places])

    def forget(self, tables: npt.NDArray[Any], keys: Ints) -> None:
        """Hold nothing any more of rows: neither records nor gradients that wait, wherever there are any."""
        self.num_removals += 1
        for number, places, positions in self.by_group(tables):
            some = keys[places]
            held = np.flatnonzero(self.groups[number].index.find_each(positions, some) >= 0)
            self.remove_of_group(number, positions[held], some[held])
            for buffer in (buffer for (_, group), buffer in self._buffers.items() if group == number):
                waiting = np.flatnonzero(buffer.index.find_each(positions, some) >= 0)
                remove(buffer, positions[waiting], some[waiting])

    def clear(self) -> None:
        """Forget every record, and give the memory back; no gradient may wait."""
        self.num_removals += 1
        for group in self.groups:
            group.clear()
        self._buffers.clear()

    def remove_of_group(self, number: int, positions: Ints, keys: Ints) -> None:
        """Forget records of a group."""
        self.num_removals += 1
        remove(self.groups[number], positions, keys)

    def make(self, tables: npt.NDArray[Any], keys: Ints) -> None:
        """Have rows that may never have been trained; new ones get their first values."""
        for number, places, positions in self.by_group(tables):
            self.groups[number].make_fresh(positions, keys[places])

    def buffer(self, worker: int, number: int) -> GradientBuffer:
        """Where the gradients of a worker wait, of the tables of a group."""
        if (worker, number) not in self._buffers:
            group = self.groups[number]
            self._buffers[worker, number] = GradientBuffer(len(group.tables), group.dim, group.dtype)
        return self._buffers[worker, number]

    @property
    def num_waiting(self) -> int:
        """Gradients that wait here."""
        return sum(len(buffer.index) for buffer in self._buffers.values())

    def _records_among(
        self, number: int, payloads: Payloads, kinds: Kinds, others: bool
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """The records of a group among payloads: keys table by table, starts, lengths and offsets."""
        group = self.groups[number]
        found: tuple[Ints, Ints, Ints, Ints] = pick_records(
            payloads.kind, payloads.payload, payloads.table, payloads.key, payloads.row, payloads.offsets,
            kinds, 0 if others else _ALL_ROWS, self._group_of, self._position_of, number, len(group.tables),
            group.dim * group.dtype.itemsize, group.arena.record_bytes,
        )  # fmt: skip
        return found

    def _gradients_among(
        self, number: int, payloads: Payloads, kinds: Kinds, done: npt.NDArray[np.uint8]
    ) -> Iterator[tuple[int, Ints, Ints, Ints]]:
        """The gradients of a group among payloads: by worker, keys table by table, starts and offsets."""
        group = self.groups[number]
        keys, starts, offsets = pick_gradients(
            payloads.kind, payloads.payload, payloads.table, payloads.key, payloads.source, payloads.offsets,
            kinds, done, self._group_of, self._position_of, number, len(group.tables),
            group.dim * group.dtype.itemsize, group.arena.record_bytes,
        )  # fmt: skip
        for worker in range(len(starts)):
            first, last = starts[worker, [0, -1]].tolist()
            if first < last:
                yield worker, keys[first:last], starts[worker] - first, offsets[first:last]

    def _summed(
        self, number: int, keys: Ints, starts: Ints, contributors: npt.NDArray[np.uint64]
    ) -> npt.NDArray[Any]:
        """The gradients of rows, added up from worker 0 on; they leave their shelves."""
        group = self.groups[number]
        sums = np.zeros((len(keys), group.dim), group.dtype)
        everyone = int(np.bitwise_or.reduce(contributors)) if len(contributors) else 0
        for worker in (j for j in range(everyone.bit_length()) if everyone >> j & 1):
            places, some, begins = rows_of_contributor(contributors, keys, starts, worker)
            buffer = self.buffer(worker, number)
            locations = self.take_gradients_of(worker, number, some, begins)
            add_records(buffer.arena.addresses, buffer.arena.shift, locations, places, sums)
            buffer.arena.release(locations)
        return sums

    def take_gradients_of(
        self, worker: int, number: int, keys: Ints, starts: Ints, *, keep: bool = False
    ) -> Ints:
        """Where gradients are; unless they are kept they are forgotten, their records not yet released."""
        buffer = self.buffer(worker, number)
        if not keep:
            try:
                return buffer.index.delete(keys, starts)
            except KeyError:
                pass  # nothing was deleted; what is missing is told below
        locations, num_absent = buffer.index.find(keys, starts)
        if num_absent.any():
            absent = np.flatnonzero(locations < 0)
            table = self.groups[number].tables[int(np.searchsorted(starts, absent[0], side="right")) - 1]
            raise MissingRowError(
                f"{len(absent)} gradients are not where the plan has them, first of key "
                f"{int(keys[absent[0]])} of table {table.name!r}; please report this"
            )
        return locations
