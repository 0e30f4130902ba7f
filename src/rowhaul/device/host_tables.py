"""The rows behind a card's cache: tables in host memory, read and written by several threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.nn.threads import run_all
from rowhaul.store import TableGroup
from rowhaul.store.keyed import copy_in, copy_out, locate_or_add

Int64s = npt.NDArray[np.int64]

_NUM_THREADS = max(1, min(8, (os.cpu_count() or 1) - 2))  # training and loading have threads, too
_WORTH_THREADS = 2048  # rows


class HostTables:
    """Finds, reads and writes many rows of a group at once; by one caller at a time."""

    def __init__(self, group: TableGroup) -> None:
        self.group = group
        self._lengths = self._offsets = np.empty(0, np.int64)

    def fetch(self, tables: Int64s, keys: Int64s, out: npt.NDArray[Any]) -> tuple[Int64s, Int64s]:
        """Copy the rows that are there to the first rows of ``out``; returns where they are, and which."""
        locations = np.empty(len(keys), np.int64)
        lengths, offsets, flat = self._layout(len(keys), out)
        is_empty = not self.group.arena.num_records

        def fetch(some: slice) -> None:
            found = self.group.index.find_each(tables[some], keys[some])
            locations[some] = found
            if not is_empty:
                copy_out(self.group, np.maximum(found, 0), lengths[some], offsets[some], flat)

        _in_parts(fetch, len(keys))
        known = np.flatnonzero(locations >= 0)
        if len(known) < len(keys):
            out[: len(known)] = out[known]
        return locations, known

    def write(self, tables: Int64s, keys: Int64s, locations: Int64s, rows: npt.NDArray[Any]) -> Int64s:
        """Set rows; those whose location is -1 are added. Returns where they all are."""
        absent = np.flatnonzero(locations < 0)
        if len(absent):
            locations = locations.copy()
            locations[absent], _ = locate_or_add(self.group, tables[absent], keys[absent])
        self.group.arena.before_change(locations)
        lengths, offsets, flat = self._layout(len(locations), rows)
        _in_parts(
            lambda some: copy_in(self.group, locations[some], lengths[some], offsets[some], flat),
            len(locations),
        )
        return locations

    def _layout(self, count: int, rows: npt.NDArray[Any]) -> tuple[Int64s, Int64s, npt.NDArray[np.uint8]]:
        """Bytes of rows that lie together: how many each has, where it begins, and they themselves."""
        if count > len(self._lengths):
            size = self.group.arena.record_bytes
            self._lengths, self._offsets = np.full(count, size), np.arange(count) * size
        return self._lengths[:count], self._offsets[:count], rows.view(np.uint8).reshape(-1)


def _in_parts(work: Callable[[slice], None], count: int) -> None:
    """Do work on rows in several threads, if it is worth that."""
    if count < _WORTH_THREADS:
        work(slice(0, count))
        return
    bounds = np.linspace(0, count, _NUM_THREADS + 1).astype(np.int64).tolist()
    parts = [slice(*bound) for bound in pairwise(bounds)]
    run_all([partial(work, part) for part in parts], in_parallel=True)
