"""The rows that a rank holds: a worker's cache or a store's shard, with buffered gradients of split rows.

Both are the same memory with the same operations; a rank that stores and trains has one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rowhaul.errors import RowhaulError
from rowhaul.runtime.gradient_buffer import GradientBuffer
from rowhaul.runtime.record_kernels import note_buffered, sum_gradients
from rowhaul.schedule.sizes import RowSizes
from rowhaul.store import TableGroup
from rowhaul.store.keyed import locate_or_add, remove
from rowhaul.store.packing import RowNames
from rowhaul.transport.base import Bytes

if TYPE_CHECKING:
    from rowhaul.runtime.layout import TableLayout
    from rowhaul.runtime.phases import RankPhases
    from rowhaul.runtime.row_locations import Located

_MOST_SETTINGS = 4096  # iterations whose settings are kept
_FEW_ITERATIONS = 1000  # that are sooner counted than sorted

Ints = npt.NDArray[np.int64]
Rates = Callable[[int], float]
"""The learning rate of rows in an iteration, counted from 0; the same on every rank."""
Buffered = Sequence[tuple[int, Ints, Ints]]
"""Gradients that wait in buffers, worker by worker: whose, which sums they belong to, where they are."""


class MissingRowError(RowhaulError):
    """A row is not where the plan says: a bug in Rowhaul, caught before anything wrong was learned."""


class RowMemory:
    """Records by (table, key), and gradients by (worker, table, key).

    This one is in host memory. Another kind (`rowhaul.device.host_indexed` has them on a card) overrides what
    touches the contents of records.

    Args:
        layout: the tables.
        groups: tables that hold the records; new ones by default.
        makes_rows: whether a missing row is made with its initial values when it is looked up: true of a
            home; in a cache it would be a bug.
    """

    sums_where_received = True  # whether gradients can be summed in the buffers that they arrive in

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
        self._sizes: tuple[RowSizes, Ints, Ints] | None = None
        self._settings: dict[int, tuple[float, ...]] = {}  # of the optimizer, by iteration
        self.num_removals = 0  # locations found before the latest removal are stale

    def by_group(self, tables: npt.NDArray[Any]) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield rows by group: its number, the places of its rows, and the position of each one's table."""
        group = self._group_of[tables]
        for number in range(len(self.groups)):
            places = np.flatnonzero(group == number)
            if len(places):
                yield number, places, self._position_of[tables[places]]

    @property
    def places(self) -> tuple[Ints, Ints]:
        """By table: its group, and its position there."""
        return self._group_of, self._position_of

    @property
    def sizes(self) -> tuple[Ints, Ints]:
        """By table: bytes of a row's values, and of its record."""
        sizes = self.layout.sizes()
        if self._sizes is None or self._sizes[0] is not sizes:
            self._sizes = sizes, np.array(sizes.values, np.int64), np.array(sizes.records, np.int64)
        return self._sizes[1:]

    def place_of(self, table: int) -> tuple[int, int]:
        """A table's group, and its position there."""
        return int(self._group_of[table]), int(self._position_of[table])

    def apply(
        self,
        group: TableGroup,
        locations: Ints,
        gradients: npt.NDArray[Any],
        trained: npt.NDArray[Any],
        rates: Rates,
        rows: RowNames,
    ) -> None:
        """Take one optimizer step per record, with the rate and number of the iteration it was trained in."""
        if not len(trained):
            return
        if group.packing is not None:
            rows = rows._replace(numbers=trained.astype(np.int64) + 1)
        alike: dict[tuple[float, ...], list[int]] = {}
        for iteration in _distinct(trained):
            alike.setdefault(self._settings_of(group, iteration, rates), []).append(iteration)
        for iterations in alike.values():
            rate, number = rates(iterations[0]), iterations[0] + 1
            if len(alike) == 1:
                group.update(locations, gradients, rate, number, rows)
            else:
                some = np.flatnonzero(np.isin(trained, iterations))
                group.update(locations[some], gradients[some], rate, number, rows.some(some))

    def _settings_of(self, group: TableGroup, iteration: int, rates: Rates) -> tuple[float, ...]:
        """The optimizer's scalars in an iteration; those asked for lately are kept."""
        settings = self._settings.get(iteration)
        if settings is None:
            if len(self._settings) >= _MOST_SETTINGS:
                self._settings.clear()
            settings = group.optimizer.settings(rates(iteration), iteration + 1)
            self._settings[iteration] = settings
        return settings

    def buffer_gradients(
        self,
        number: int,
        positions: Ints,
        keys: Ints,
        worker: int,
        gradients: npt.NDArray[Any],
        iteration: int,
        *,
        accumulate: bool = False,
    ) -> None:
        """Buffer a worker's gradients of an iteration until they are pushed, as they are sent.

        With bounded staleness they accumulate.
        """
        buffer, group, rows = self.buffer(worker, number), self.groups[number], RowNames(positions, keys)
        if not accumulate:
            buffer.write(positions, keys, group.pack_gradients(gradients, rows, iteration + 1, worker))
            return
        locations, added = locate_or_add(buffer, positions, keys)
        if len(added) < len(keys):
            old = np.ones(len(keys), np.bool_)
            old[added] = False
            gradients = gradients.copy()
            gradients[old] = group.unpack_gradients(buffer.arena.read(locations[old])) + gradients[old]
        buffer.arena.write(locations, group.pack_gradients(gradients, rows, iteration + 1, worker))

    def remove(self, tables: npt.NDArray[Any], keys: Ints) -> None:
        """Remove records."""
        for number, places, positions in self.by_group(tables):
            self.remove_of_group(number, positions, keys[places])

    def forget(self, tables: npt.NDArray[Any], keys: Ints) -> None:
        """Remove records and buffered gradients of rows, if there are any."""
        self.num_removals += 1
        for number, places, positions in self.by_group(tables):
            some = keys[places]
            held = np.flatnonzero(self.groups[number].index.find_each(positions, some) >= 0)
            self.remove_of_group(number, positions[held], some[held])
            for buffer in (buffer for (_, group), buffer in self._buffers.items() if group == number):
                waiting = np.flatnonzero(buffer.index.find_each(positions, some) >= 0)
                remove(buffer, positions[waiting], some[waiting])

    def clear(self) -> None:
        """Remove all records and free their memory; no gradient may be buffered."""
        self.num_removals += 1
        for group in self.groups:
            group.clear()
        self._buffers.clear()

    def remove_of_group(self, number: int, positions: Ints, keys: Ints) -> None:
        """Remove records of a group."""
        self.num_removals += 1
        remove(self.groups[number], positions, keys)

    def make(self, tables: npt.NDArray[Any], keys: Ints) -> None:
        """Make rows with their initial values, unless they exist."""
        for number, places, positions in self.by_group(tables):
            self.groups[number].make_fresh(positions, keys[places])

    def buffer(self, worker: int, number: int) -> GradientBuffer:
        """The buffered gradients of a worker, of the tables of a group."""
        if (worker, number) not in self._buffers:
            self._buffers[worker, number] = self._make_buffer(self.groups[number])
        return self._buffers[worker, number]

    def _make_buffer(self, group: TableGroup) -> GradientBuffer:
        return GradientBuffer(len(group.tables), *group.gradient_shape)

    def locate(self, phases: RankPhases) -> Located:
        """Prepare to locate the rows of a plan."""
        from rowhaul.runtime.row_locations import Located  # which knows this module

        return Located(self, phases)

    def message_buffer(self, num_bytes: int) -> Bytes:
        """Memory for the messages of a phase."""
        return np.empty(num_bytes, np.uint8)

    def finish_packing(self) -> None:
        """Wait until what was packed is in its buffer."""

    def sum_gradients(self, number: int, received: Ints, buffered: Buffered) -> npt.NDArray[Any]:
        """Sum gradients of rows of a group in the order of workers.

        Args:
            number: of the group.
            received: rows x workers, addresses of gradients that have arrived, 0 where there is none.
            buffered: those that wait here.
        """
        group = self.groups[number]
        for worker, places, locations in buffered:
            arena = self.buffer(worker, number).arena
            note_buffered(
                arena.addresses, arena.shift, arena.record_bytes, places, locations, worker, received
            )
        sums = np.empty((len(received), group.dim), group.dtype)
        if group.packing is None:
            sum_gradients(received, sums)
        else:
            group.packing.sum_gradients(received, sums)
        return sums

    @property
    def num_waiting(self) -> int:
        """Buffered gradients."""
        return sum(len(buffer.index) for buffer in self._buffers.values())

    def take_gradients(
        self, worker: int, number: int, keys: Ints, starts: Ints, *, keep: bool = False
    ) -> Ints:
        """Find gradients and, unless they are kept, remove their keys; the caller releases their records."""
        index = self.buffer(worker, number).index
        locations, num_absent = index.find(keys, starts)
        if num_absent:
            absent = np.flatnonzero(locations < 0)
            table = self.groups[number].tables[int(np.searchsorted(starts, absent[0], side="right")) - 1]
            raise MissingRowError(
                f"{len(absent)} gradients are not where the plan has them, first of key "
                f"{int(keys[absent[0]])} of table {table.name!r}; please report this"
            )
        if not keep:
            index.remove_found(keys, starts)
        return locations


def _distinct(iterations: npt.NDArray[Any]) -> list[int]:
    """The different iterations, in order; most are recent ones, or all the same."""
    first, last = int(iterations.min()), int(iterations.max())
    if first == last:
        return [first]
    if last - first > len(iterations) + _FEW_ITERATIONS:
        found: list[int] = np.unique(iterations).tolist()
    else:
        found = (first + np.flatnonzero(np.bincount(iterations - first))).tolist()
    return found
