"""`Overlay`: the rows that changed since a base, found before those of the base.

An overlay never changes: `with_changes` returns another one. A request that has begun with the older one
finishes with it. Records stay in the mapped files of the changes; memory holds 16 bytes for each slot, of
which at most half are used, and copies the slots of tables that change.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rowhaul.errors import CheckpointError
from rowhaul.serve.overlay_kernels import DELETED, FREE, copy_slots, find_places, put_places
from rowhaul.serve.row_file import BY_KEY, FIELD, RowFile

Int64s = npt.NDArray[np.int64]

_SAME = ("dim", "value_type", "record_bytes", "finds_by", "num_chunks", "num_columns")
_LEAST_SLOTS = 16


class _Slots:
    """The changed rows of one table."""

    def __init__(self, slots: Int64s, taken: int) -> None:
        self.slots, self.taken = slots, taken

    def with_room(self, seed: int, count: int) -> _Slots:
        """Return a copy that has room for so many more keys."""
        size = max(_LEAST_SLOTS, 1 << (2 * (self.taken + count) - 1).bit_length())
        if size <= len(self.slots):
            return _Slots(self.slots.copy(), self.taken)
        made = np.zeros((size, 2), np.int64)
        copy_slots(made, seed, self.slots)
        return _Slots(made, self.taken)

    def put(self, seed: int, keys: Int64s, places: Int64s) -> None:
        self.taken += int(put_places(self.slots, seed, keys, places))


class Overlay:
    """Changed rows of the tables of a base.

    Args:
        base: the file that changes are of.
    """

    def __init__(self, base: RowFile) -> None:
        self._base = base
        self.seed = int.from_bytes(os.urandom(8), "little", signed=True)  # nobody can aim at a slot
        self._tables = [_Slots(np.zeros((0, 2), np.int64), 0) for _ in base.entries]
        self._files: tuple[RowFile, ...] = ()  # what places point into
        self.entries = self._entries()

    @property
    def num_rows(self) -> int:
        """Rows that were changed or deleted."""
        return sum(one.taken for one in self._tables)

    def with_changes(self, files: Sequence[RowFile]) -> Overlay:
        """Return an overlay that has these changes, too; no row is in two of the files.

        Raises:
            CheckpointError: a file is not a change of this base.
        """
        for file in files:
            check_change(self._base, file)
        made = object.__new__(Overlay)
        made._base, made.seed, made._files = self._base, self.seed, (*self._files, *files)
        made._tables = list(self._tables)
        for table, number in self._base.tables.items():
            parts = [_changes(file, table) for file in files]
            count = sum(len(keys) for keys, _ in parts)
            if count:
                made._tables[number] = self._tables[number].with_room(self.seed, count)
            for keys, places in parts:
                made._tables[number].put(self.seed, keys, places)
        made.entries = made._entries()
        return made

    def places(self, table: str, keys: Int64s) -> Int64s:
        """Return the addresses of records; 0: not changed, -1: deleted."""
        slots = self._tables[self._base.tables[table]].slots
        found = np.full(len(keys), FREE, np.int64)
        if len(slots):
            find_places(slots, self.seed, keys, found)
        return found

    def rows(self, table: str) -> tuple[Int64s, Int64s]:
        """Return the keys of a table's changed rows, and the addresses of their records."""
        slots = self._tables[self._base.tables[table]].slots
        there = slots[(slots[:, 1] != FREE) & (slots[:, 1] != DELETED)]
        return np.ascontiguousarray(there[:, 0]), np.ascontiguousarray(there[:, 1])

    def _entries(self) -> Int64s:
        """Return where the slots of each table are, and one less than their number."""
        pairs = [(one.slots.ctypes.data, len(one.slots) - 1) for one in self._tables]
        return np.array(pairs, np.int64).reshape(-1, 2)


def check_change(base: RowFile, file: RowFile) -> None:
    """Refuse a file of other tables than a base has.

    Raises:
        CheckpointError: it names the table.
    """
    if base.tables.keys() != file.tables.keys():
        raise CheckpointError(
            f"{file.path} is of another schema: its tables are {', '.join(file.tables)}, those of "
            f"{base.path} {', '.join(base.tables)}; publish both from one run"
        )
    for table, number in base.tables.items():
        for name in _SAME:
            ours = int(base.entries[number, FIELD[name]])
            if (theirs := file.field(table, name)) != ours:
                raise CheckpointError(
                    f"{file.path} is of another schema: {name} of table {table!r} is {theirs}, and {ours} in "
                    f"{base.path}; publish both from one run"
                )
        if file.field(table, "finds_by") != BY_KEY:
            raise CheckpointError(f"{file.path}: rows of table {table!r} are shared by ids; export again")


def _changes(file: RowFile, table: str) -> tuple[Int64s, Int64s]:
    """Return the keys of a file's table, and the addresses of their records; -1 for deleted ones."""
    deleted = file.deleted(table)
    places = file.address + file.field(table, "records_at") + file.offsets(table)
    keys = np.concatenate([deleted, file.keys(table)])
    return keys, np.concatenate([np.full(len(deleted), DELETED), places])
