"""The rows that one process stores, for several threads: find, create, read, step and delete them.

Looking up and inserting share the lock ``structure``; deleting, and starting or ending a snapshot, hold it
alone. Reading rows shares the lock ``records``; a step holds it alone, so that no reader sees half of a step.
Locks are taken in the order deleting, structure, records.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul.database.leases import Lease, Leases
from rowhaul.database.settings import DatabaseSettings
from rowhaul.database.threads import Pieces, RefusingLock, SharedLock
from rowhaul.database.vectors import Floats, Gradients, Int64s, Vectors, read_vectors, sum_by_record
from rowhaul.store.tables import TableGroup

if TYPE_CHECKING:
    from rowhaul.database.snapshot import Snapshot


class Place(NamedTuple):
    """Where a table is: its group, and its position in the group."""

    group: int
    position: int


@dataclass(frozen=True)
class Keys:
    """Keys of one group of tables, table by table."""

    group: int
    values: Int64s
    starts: Int64s  # tables + 1: where each table's keys begin

    @property
    def tables(self) -> Int64s:
        """The position of each key's table."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def where(self, chosen: npt.NDArray[np.bool_]) -> Keys:
        """Select some of the keys."""
        bounds = np.concatenate([[0], np.cumsum(chosen)])
        return Keys(self.group, self.values[chosen], bounds[self.starts])


class SharedTables(TableGroup):
    """A group of tables that reports new rows to snapshots before other threads can find them."""

    def find_or_create(
        self, keys: Keys, snapshots: Sequence[Snapshot], contents: Floats | None = None
    ) -> Int64s:
        """Locations of distinct keys; new rows get their initial values, or the records given."""

        def allocate(absent: Int64s) -> Int64s:
            records = self.arena.allocate(len(absent))
            try:
                if contents is None:
                    self._write_initial(self.arena, records, keys.values, keys.starts, absent)
                else:
                    self.arena.write(records, contents[absent])
                for snapshot in snapshots:
                    new = Keys(keys.group, keys.values[absent], np.searchsorted(absent, keys.starts))
                    snapshot.note_inserted(new)
            except BaseException:
                self.arena.release(records)
                raise
            return records

        locations, _ = self.index.find_or_insert(keys.values, keys.starts, allocate, self.arena.release)
        return locations

    def unknown_rows(self, keys: Keys, absent: Int64s, on_unknown: str) -> Floats:
        """The values that keys without a row read as."""
        return self._unknown_rows(keys.values, keys.starts, absent, on_unknown)


class Rows:
    """All rows of one process.

    Args:
        settings: tables, optimizer, dtype and seed.
        pieces: runs the parts of large reads and steps.
    """

    def __init__(self, settings: DatabaseSettings, pieces: Pieces) -> None:
        self.settings, self.pieces = settings, pieces
        self.groups: list[SharedTables] = []
        self.places: dict[str, Place] = {}
        for dim in dict.fromkeys(spec.dim for spec in settings.tables):
            specs = [spec for spec in settings.tables if spec.dim == dim]
            for position, spec in enumerate(specs):
                self.places[spec.name] = Place(len(self.groups), position)
            self.groups.append(SharedTables(specs, settings.optimizer, settings.dtype, settings.seed))
        self.deleting = RefusingLock(
            "rows of this thread's snapshot are being read; finish or close the iterator first"
        )
        self.structure, self.records = SharedLock(), SharedLock()
        self.leases = Leases(lambda group, records: self.groups[group].arena.release(records))
        self.num_steps = 0  # changes with the rows: read it with the lock of the records to have both agree
        self._snapshots: list[weakref.ref[Snapshot]] = []

    def num_rows(self, table: str) -> int:
        """Rows that a table holds now."""
        place = self.places[table]
        return int(self.groups[place.group].index.num_keys[place.position])

    def find(self, keys: Keys) -> Int64s:
        """Locations of keys, -1 for those without a row."""
        with self.structure.shared():
            locations, _ = self.groups[keys.group].index.find(keys.values, keys.starts)
        return locations

    def find_or_create(self, keys: Keys, contents: Floats | None = None) -> Int64s:
        """Locations of distinct keys; all of them exist afterwards, or none was added.

        Args:
            keys: which rows.
            contents: records for new rows; their initial values unless given.
        """
        self.leases.sweep()
        with self.structure.shared():
            return self.groups[keys.group].find_or_create(keys, self.snapshots(), contents)

    def read(self, group: int, vectors: Vectors, out: Floats) -> None:
        """Write vectors to ``out``."""
        with self.records.shared():
            read_vectors(self.groups[group].arena, vectors, out, self.pieces)

    def read_records(self, group: int, records: Int64s) -> Floats:
        """Whole records, values before state."""
        with self.records.shared():
            return self.groups[group].arena.read(records)

    def is_stale(self, lease: Lease, group: int, records: Int64s) -> bool:
        """Whether any of the records was deleted since a lease began."""
        deleted = self.leases.deleted_since(lease, group)
        return bool(len(deleted)) and bool(np.isin(records, deleted).any())

    def step(self, gradients: Sequence[Gradients], lr: float) -> int:
        """Take one optimizer step with the sums of all gradients, added in order; return the rows it moved.

        Gradients of rows deleted since they were found are dropped. If memory for the sums runs out, nothing
        has changed.
        """
        by_table: dict[tuple[int, str | None], list[tuple[Int64s, Floats]]] = {}
        with self.records.exclusive():
            for given in gradients:
                alive = self._without_deleted(given)
                if len(alive[0]):
                    by_table.setdefault((given.group, given.table), []).append(alive)
            sums = [(group, *sum_by_record(parts)) for (group, _), parts in by_table.items()]
            for snapshot in self.snapshots():
                for group, records, _ in sums:
                    snapshot.save_records(group, records)
            for group, records, summed in sums:
                self._step_group(self.groups[group], records, summed, lr)
            self.num_steps += 1
        return sum(len(records) for _, records, _ in sums)

    def delete(self, keys: Keys) -> int:
        """Delete the rows of distinct keys; return how many existed.

        Raises:
            ConfigError: this thread is reading the blocks of a snapshot, and would wait for itself.
        """
        index = self.groups[keys.group].index
        with self.deleting, self.structure.exclusive():
            locations, _ = index.find(keys.values, keys.starts)
            known = locations >= 0
            keys, locations = keys.where(known), locations[known]
            for snapshot in self.snapshots():
                snapshot.note_deleted(keys, locations)
            index.discard(keys.values, keys.starts)
            self.leases.retire(keys.group, locations)
        return len(locations)

    def load(self, table: str, keys: Int64s, contents: Floats) -> None:
        """Set rows, known or not, to whole records; for one thread."""
        place = self.places[table]
        self.groups[place.group].load(place.position, keys, contents)

    def reserve(self, num_rows: Mapping[str, int]) -> None:
        """Reserve room in the index for this number of rows in each table."""
        for group in self.groups:
            group.index.reserve(np.array([num_rows.get(spec.name, 0) for spec in group.tables], np.int64))

    def add_snapshot(self, snapshot: Snapshot) -> None:
        """Save records for a snapshot from now on, until it is closed or dropped; both locks are held."""
        self._snapshots = [weakref.ref(one) for one in (*self.snapshots(), snapshot)]

    def snapshots(self) -> list[Snapshot]:
        """The snapshots that are open."""
        alive = [one for reference in self._snapshots if (one := reference()) is not None]
        return [one for one in alive if one.is_open]

    def _without_deleted(self, given: Gradients) -> tuple[Int64s, Floats]:
        deleted = self.leases.deleted_since(given.lease, given.group)
        if not len(deleted):
            return given.records, given.values
        alive = ~np.isin(given.records, deleted)
        return given.records[alive], given.values[alive]

    def _step_group(self, group: SharedTables, records: Int64s, gradients: Floats, lr: float) -> None:
        number = self.num_steps + 1
        self.pieces.run(
            len(records),
            group.arena.record_bytes,
            lambda first, last: group.update(records[first:last], gradients[first:last], lr, number),
        )
