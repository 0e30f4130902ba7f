"""The rows behind a card's cache: tables in host memory, read and written by several threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.device.host_kernels import fetch_known, read_known, write_known
from rowhaul.nn.threads import run_all
from rowhaul.store import TableGroup
from rowhaul.store.keyed import locate_or_add

Int64s = npt.NDArray[np.int64]

_NUM_THREADS = max(1, min(8, (os.cpu_count() or 1) - 2))  # training and loading have threads, too
_WORTH_THREADS = 2048  # rows
_FREE = np.iinfo(np.int64).min  # the home of a record that holds no row


class HostTables:
    """All rows, and for each record of the card where its row is here; by one caller at a time.

    The home of a record is the location of its row, or -1 - n: host memory lacks the row, which was made
    for batch n.
    """

    def __init__(self, group: TableGroup, num_records: int) -> None:
        self.group, self._num_records = group, num_records
        self.forget_card()

    def forget_card(self) -> None:
        """Forget what the card holds."""
        self._homes = np.full(self._num_records, _FREE)
        self._names = np.zeros((self._num_records, 2), np.int64)  # key and table, if there is no location

    def exists(self, slots: Int64s, last_read: int) -> npt.NDArray[np.bool_]:
        """Whether records hold more than plans: rows that a batch up to ``last_read`` uses."""
        homes = self._homes[slots]
        exists: npt.NDArray[np.bool_] = (homes >= 0) | ((homes > _FREE) & (-1 - homes <= last_read))
        return exists

    def look(self, tables: Int64s, keys: Int64s, out: npt.NDArray[Any]) -> Int64s:
        """Copy the rows that are there to their places in ``out``; returns where they are here, or -1."""
        return self._read(read_known, tables, keys, out, lambda some: ())

    def fetch(
        self, slots: Int64s, tables: Int64s, keys: Int64s, number: int, out: npt.NDArray[Any]
    ) -> Int64s:
        """The same for rows that go to records of the card, for a batch of that number."""
        notes = -1 - number, self._homes, self._names
        return self._read(fetch_known, tables, keys, out, lambda some: (slots[some], *notes))

    def _read(
        self,
        kernel: Any,
        tables: Int64s,
        keys: Int64s,
        out: npt.NDArray[Any],
        more: Callable[[slice], tuple[Any, ...]],
    ) -> Int64s:
        arena, locations = self.group.arena, np.empty(len(keys), np.int64)
        memory = arena.addresses, arena.shift, arena.record_bytes

        def read(some: slice) -> None:
            index, seen, _in_use = self.group.index.read_by_kernels()
            names = tables[some], keys[some]
            rows = *memory, out[some.start :].ctypes.data, locations[some]
            while kernel(index, seen, *names, *rows, *more(some)):  # somebody changes the index
                index, seen, _in_use = self.group.index.read_by_kernels()

        _in_parts(read, len(keys))
        return locations

    def write(self, slots: Int64s, rows: npt.NDArray[Any], *, evicts: bool) -> Int64s:
        """Set the rows of records, which hold none any more if this evicts them; adds those that are new.

        Returns how many of each table are.
        """
        group, homes = self.group, self._homes
        if group.arena.keeper is not None:
            known = homes[slots]
            group.arena.before_change(known[known >= 0])
        memory = group.arena.addresses, group.arena.shift, group.arena.record_bytes
        left_home = _FREE if evicts else 0
        locations = np.empty(len(slots), np.int64)
        num_homeless = []

        def write(some: slice) -> None:
            first = rows[some.start :].ctypes.data
            given = slots[some], homes, left_home, first, locations[some]
            num_homeless.append(write_known(*memory, *given))

        _in_parts(write, len(slots))
        added = np.zeros(len(group.tables), np.int64)
        if any(num_homeless):
            homeless = np.flatnonzero(locations < 0)
            keys, tables = np.ascontiguousarray(self._names[slots[homeless]].T)
            found, _ = locate_or_add(group, tables, keys)
            group.arena.write(found, rows[homeless])
            if not evicts:
                homes[slots[homeless]] = found
            added += np.bincount(tables, minlength=len(added))
        return added


def _in_parts(work: Callable[[slice], None], count: int) -> None:
    """Do work on rows in several threads, if it is worth that."""
    if count < _WORTH_THREADS:
        work(slice(0, count))
        return
    bounds = np.linspace(0, count, _NUM_THREADS + 1).astype(np.int64).tolist()
    parts = [slice(*bound) for bound in pairwise(bounds)]
    run_all([partial(work, part) for part in parts], in_parallel=True)
