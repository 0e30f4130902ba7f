"""The rows behind a card's cache: tables in host memory that the card reads and writes itself."""

from __future__ import annotations

import os
import threading
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.device.lanes import here, settle
from rowhaul.device.pinned_arena import PinnedArena
from rowhaul.errors import RowhaulError
from rowhaul.nn.threads import run_all
from rowhaul.store import TableGroup
from rowhaul.store.keyed import locate_or_add

Int64s = npt.NDArray[np.int64]

_NUM_THREADS = max(1, min(6, (os.cpu_count() or 1) - 2))  # training and loading have threads, too
_MOST_ROWS = 2**31  # the card knows them by numbers of 32 bits
_WORTH_THREAD = 1 << 15  # rows: to wake a thread takes its turn in Python from the others


class HostTables:
    """All rows; and the names of those that only the card has, by its records."""

    def __init__(self, group: TableGroup, num_records: int, device: torch.device) -> None:
        self.group, self._num_records, self._device = group, num_records, device
        group.arena = PinnedArena(group.arena.width, group.arena.dtype, device)
        self._growing = threading.Lock()
        self._all_chunks: list[Tensor] = []  # kernels may still read from the smaller ones
        self.forget_card()
        self.forget_chunks()

    def clear(self) -> None:
        """Forget every row."""
        self.group.clear()
        self.forget_chunks()

    def forget_card(self) -> None:
        """Forget what the card holds."""
        self._names = np.zeros((self._num_records, 2), np.int64)  # key and table of rows that are not here

    def forget_chunks(self) -> None:
        """Forget where records are."""
        self._chunks, self._num_chunks = torch.zeros(64, dtype=torch.int64, device=self._device), 0

    def chunks_there(self) -> Tensor:
        """Addresses of all chunks of records that there are by now, on the card; from any thread."""
        addresses = self.group.arena.addresses
        with self._growing:
            if len(addresses) > self._num_chunks:
                if len(addresses) << self.group.arena.shift > _MOST_ROWS:
                    raise RowhaulError(
                        f"host memory has over {_MOST_ROWS:,} rows of one size, more than a card's cache "
                        "numbers; spread them over more workers"
                    )
                if len(addresses) > len(self._chunks):
                    self._all_chunks.append(self._chunks)
                    self._chunks = self._chunks.new_zeros(2 * len(addresses))
                # Those known before stay as they are, under kernels that read them.
                self._chunks[: len(addresses)].copy_(torch.from_numpy(addresses))
                settle(here(self._device))
                self._num_chunks = len(addresses)
            return self._chunks

    def find(self, tables: Int64s, keys: Int64s, locations: Int64s) -> None:
        """Write where rows are, or -1."""

        def find(some: slice) -> None:
            locations[some] = self.group.index.find_each(tables[some], keys[some])

        num_threads = min(_NUM_THREADS, len(keys) // _WORTH_THREAD + 1)
        bounds = np.linspace(0, len(keys), num_threads + 1).astype(np.int64).tolist()
        run_all([partial(find, slice(*bound)) for bound in pairwise(bounds)], in_parallel=True)

    def name(self, slots: Int64s, tables: Int64s, keys: Int64s) -> None:
        """Note the rows of the card's records, which are not here."""
        self._names[slots, 0], self._names[slots, 1] = keys, tables

    def add(self, slots: Int64s, rows: npt.NDArray[Any]) -> tuple[Int64s, Int64s]:
        """Add the rows of the card's records; returns where they are, and how many of each table."""
        keys, tables = np.ascontiguousarray(self._names[slots].T)
        locations, _ = locate_or_add(self.group, tables, keys)
        self.group.arena.write(locations, rows)
        return locations, np.bincount(tables, minlength=len(self.group.tables))

    def look(self, tables: Int64s, keys: Int64s) -> tuple[Int64s, npt.NDArray[Any]]:
        """Return where rows are, or -1, and copies of them."""
        locations = np.empty(len(keys), np.int64)
        self.find(tables, keys, locations)
        rows = np.empty((len(keys), self.group.width), self.group.dtype)
        is_known = locations >= 0
        rows[is_known] = self.group.arena.read(locations[is_known])
        return locations, rows
