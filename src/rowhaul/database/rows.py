"""The rows that one process stores: found, made, read, stepped and deleted by several threads at once.

`EmbeddingDatabase` is this behind tickets; its distributed twin has one on every rank.

Locks keep threads apart. Looking up and inserting share ``structure``; deleting and beginning a snapshot have
it alone. Reading rows shares ``records``; a step has it alone, so that nobody reads half of one. They are
taken in the order deleting, structure, records.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.database.leases import Lease, Leases
from rowhaul.database.locks import SharedLock
from rowhaul.database.pieces import Pieces
from rowhaul.database.pooled import Vectors, read_vectors
from rowhaul.database.settings import DatabaseSettings
from rowhaul.database.stepping import Gradients, sum_by_record
from rowhaul.database.views import View
from rowhaul.optim import RowOptimizerRule
from rowhaul.store.tables import TableGroup, TableSpec

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """Where a table is: its group, and its position there."""

    group: int
    position: int


class SharedTables(TableGroup):
    """A group of tables that says which rows are new before anybody can find them."""

    def locate_or_make(
        self,
        keys: Int64s,
        starts: Int64s,
        views: Sequence[View],
        group: int,
        contents: npt.NDArray[Any] | None = None,
    ) -> Int64s:
        """Locations of distinct keys; those without a row get one, with its first values or those given."""

        def allocate(absent: Int64s) -> Int64s:
            records = self.arena.allocate(len(absent))
            try:
                if contents is None:
                    self._write_initial(self.arena, records, keys, starts, absent)
                else:
                    self.arena.write(records, contents[absent])
                for view in views:
                    view.note_new(group, keys[absent], np.searchsorted(absent, starts))
            except BaseException:
                self.arena.release(records)
                raise
            return records

        locations, _ = self.index.find_or_insert(keys, starts, allocate, self.arena.release)
        return locations

    def unknown_rows(self, keys: Int64s, starts: Int64s, absent: Int64s, on_unknown: str) -> npt.NDArray[Any]:
        """What keys without a row read as."""
        return self._unknown_rows(keys, starts, absent, on_unknown)


class Rows:
    """All rows of one process, by table and key.

    Args:
        settings: tables, optimizer, type and seed.
        pieces: runs the parts of large reads and steps.
    """

    def __init__(self, settings: DatabaseSettings, pieces: Pieces) -> None:
        self.settings, self.pieces = settings, pieces
        self.groups: list[SharedTables] = []
        self.places: dict[str, Place] = {}
        for dim in dict.fromkeys(spec.dim for spec in settings.tables):
            specs = [spec for spec in settings.tables if spec.dim == dim]
            self.places |= {
                spec.name: Place(len(self.groups), position) for position, spec in enumerate(specs)
            }
            self.groups.append(SharedTables(specs, self.optimizer, settings.dtype, settings.seed))
        self.deleting = threading.Lock()
        self.structure, self.records = SharedLock(), SharedLock()
        self.leases = Leases(lambda group, records: self.groups[group].arena.release(records))
        self.views: tuple[View, ...] = ()

    @property
    def optimizer(self) -> RowOptimizerRule:
        """The rule of every step."""
        return self.settings.optimizer

    def spec(self, place: Place) -> TableSpec:
        """The table at a place."""
        return self.groups[place.group].tables[place.position]

    def num_rows(self, table: str) -> int:
        """Rows that a table holds now."""
        place = self.places[table]
        return int(self.groups[place.group].index.num_keys[place.position])

    def find_or_make(self, group: int, keys: Int64s, starts: Int64s) -> Int64s:
        """Locations of distinct keys, table by table; all of them exist afterwards, or none was added."""
        self.leases.sweep()
        with self.structure.shared():
            return self.groups[group].locate_or_make(keys, starts, self._live_views(), group)

    def put(self, table: str, keys: Int64s, contents: npt.NDArray[Any]) -> Int64s:
        """Add rows that are not there, with their records as they were elsewhere; where they are now."""
        place = self.places[table]
        group = self.groups[place.group]
        starts = starts_of(len(group.tables), place.position, len(keys))
        with self.structure.shared():
            return group.locate_or_make(keys, starts, self._live_views(), place.group, contents)

    def find(self, table: str, keys: Int64s) -> Int64s:
        """Locations of keys of a table, -1 for those that have no row."""
        place = self.places[table]
        group = self.groups[place.group]
        with self.structure.shared():
            locations, _ = group.index.find(keys, starts_of(len(group.tables), place.position, len(keys)))
        return locations

    def read(self, group: int, vectors: Vectors, out: npt.NDArray[Any]) -> None:
        """Write the vectors of one table to ``out``."""
        with self.records.shared():
            read_vectors(self.groups[group].arena, vectors, out, self.pieces)

    def read_records(self, group: int, records: Int64s) -> npt.NDArray[Any]:
        """Whole records, values before state."""
        with self.records.shared():
            return self.groups[group].arena.read(records)

    def is_stale(self, lease: Lease, group: int, records: Int64s) -> bool:
        """Whether any of the records was deleted since a lease began."""
        deleted = self.leases.deleted_since(lease, group)
        return bool(len(deleted)) and bool(np.isin(records, deleted).any())

    def step(self, gradients: Sequence[Gradients], lr: float, number: int) -> int:
        """One optimizer step with the sum of all gradients, added in the order given; the rows it moved.

        Gradients of rows that were deleted after they were found are left out. Nothing has changed if
        memory for the sums cannot be had.
        """
        with self.records.alone():
            sums = sum_by_record(gradients, self._without_deleted)
            self.views = self._live_views()
            for view in self.views:
                for group, records, _ in sums:
                    view.save(group, self.groups[group].arena, records)
            for group, records, summed in sums:
                self._step_group(self.groups[group], records, summed, lr, number)
        return sum(len(records) for _, records, _ in sums)

    def delete(self, table: str, keys: Int64s) -> int:
        """Forget rows; how many there were. Their records rest while somebody may still read them."""
        place = self.places[table]
        group = self.groups[place.group]
        keys = np.unique(keys)
        starts = starts_of(len(group.tables), place.position, len(keys))
        with self.deleting, self.structure.alone():
            locations, _ = group.index.find(keys, starts)
            here = locations >= 0
            keys, locations = keys[here], locations[here]
            starts = starts_of(len(group.tables), place.position, len(keys))
            for view in self._live_views():
                view.note_deleted(place.group, keys, starts, locations)
            group.index.discard(keys, starts)
            self.leases.retire(place.group, locations)
        return len(keys)

    def load(self, table: str, keys: Int64s, contents: npt.NDArray[Any]) -> None:
        """Set rows, known or not, to whole records; only while nobody else uses them."""
        place = self.places[table]
        self.groups[place.group].load(place.position, keys, contents)

    def reserve(self, num_rows: Mapping[str, int]) -> None:
        """Make room in the index for so many rows of each table at once."""
        for group in self.groups:
            counts = [num_rows.get(spec.name, 0) for spec in group.tables]
            group.index.reserve(np.array(counts, np.int64))

    def view(self) -> View:
        """A view of the rows as they are now, kept until it is closed."""
        with self.structure.alone(), self.records.alone():
            num_keys = [group.index.num_keys for group in self.groups]
            widths = [group.arena.width for group in self.groups]
            view = View(num_keys, widths, self.settings.dtype, self.leases.begin())
            self.views = (*self._live_views(), view)
        return view

    def forget_closed_views(self) -> None:
        """Give up the memory of views that were closed."""
        if self.views:
            with self.records.alone():
                self.views = self._live_views()

    def _live_views(self) -> tuple[View, ...]:
        views = self.views
        return tuple(view for view in views if view.is_open) if views else views

    def _without_deleted(self, given: Gradients) -> tuple[Int64s, npt.NDArray[Any]]:
        deleted = self.leases.deleted_since(given.lease, given.group)
        if not len(deleted):
            return given.records, given.gradients
        alive = ~np.isin(given.records, deleted)
        return (
            (given.records, given.gradients)
            if alive.all()
            else (given.records[alive], given.gradients[alive])
        )

    def _step_group(
        self, group: SharedTables, records: Int64s, gradients: npt.NDArray[Any], lr: float, number: int
    ) -> None:
        self.pieces.run(
            len(records),
            group.arena.record_bytes,
            lambda first, last: group.update(records[first:last], gradients[first:last], lr, number),
        )


def starts_of(num_tables: int, position: int, count: int) -> Int64s:
    """The bounds of keys that all belong to one table of a group."""
    return np.where(np.arange(num_tables + 1) > position, count, 0)
