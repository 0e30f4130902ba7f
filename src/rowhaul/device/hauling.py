"""Records on their way between a card and host memory, in the order in which plans ask for it.

The card reads and writes rows of host memory itself, by address, and knows where those of its records are. A
thread looks up where missing rows are, and adds rows that host memory does not have when they leave the card.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.device import haul_kernels
from rowhaul.device.arena import DeviceArena
from rowhaul.device.cache_counts import CacheCounts
from rowhaul.device.cache_size import CacheSize
from rowhaul.device.host_tables import HostTables
from rowhaul.device.index import DeviceIndex
from rowhaul.device.lanes import Event, Lanes, settle
from rowhaul.device.launch import columns_of, grid_of, rows_together
from rowhaul.device.staging import LeavingRows, ListedRows, Ring
from rowhaul.device.victims import Victims

Int64s = npt.NDArray[np.int64]
_NUM_LEAVING, _NUM_LISTED = 3, 4  # buffers in turn
_MOST_PROGRAMS = 256  # that fetch: as many as keep the bus busy, and leave the card to training
FREE = haul_kernels.FREE.value


@dataclass(frozen=True)
class Fetched:
    """What a plan brought to the card."""

    ready: Event  # when its rows are there
    made: Int64s  # rows by table that nobody had before


@dataclass(frozen=True)
class Added:
    """Records whose rows were added to host memory, and where."""

    slots: Int64s
    locations: Int64s


class Hauler:
    """Writes records back to host memory and fetches others.

    Kernels are ordered by streams and events: rows are written back on the stream of plans, and fetched when
    it has come to the list of what is missing. So a row is read as it was written, and a record before it is
    overwritten. What the thread does, it does in the order of plans.

    Args:
        host: the rows.
        arena: the card's records.
        size: of the cache.
        lanes: streams to work on.
        thread: where host memory is looked up.
        make: writes the first values of rows to their records, given keys, tables, records, the places of
            new rows among these, and how many there are.
    """

    def __init__(
        self,
        host: HostTables,
        arena: DeviceArena,
        size: CacheSize,
        lanes: Lanes,
        thread: Executor,
        make: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None],
    ) -> None:
        self._host, self._arena, self._size = host, arena, size
        self._lanes, self._thread, self._make = lanes, thread, make
        self.homes = torch.full((max(size.num_records, 1),), FREE, dtype=torch.int32, device=arena.device)
        self._leaving = Ring(
            lambda: LeavingRows(size.num_staged, arena.width, arena.torch_dtype, arena.device), _NUM_LEAVING
        )
        self._listed = Ring(lambda: ListedRows(arena.device), _NUM_LISTED)
        self._num_tables = len(host.group.tables)
        self.counts = CacheCounts()  # changed by the thread alone
        self.num_listed = 0  # rows that the latest batch lacked
        self.forget_card()

    def forget_card(self) -> None:
        """Forget what the card holds."""
        self._host.forget_card()
        self.homes.fill_(FREE)
        self.num_homeless = np.zeros(self._num_tables, np.int64)  # rows by table that host memory lacks

    def exist(self, slots: Tensor, last_read: int) -> Tensor:
        """Whether records hold more than plans: rows that a batch up to ``last_read`` uses."""
        homes: Tensor = self.homes[slots]
        exist: Tensor = (homes >= 0) | ((homes > FREE) & (-1 - homes <= last_read))
        return exist

    # In the thread that plans, on its stream.

    def evict(self, victims: Victims, count: int, index: DeviceIndex, last_used: Tensor) -> None:
        """Write back about ``count`` of the rows that may go; their records are free then."""
        while count > 0 and victims.has_more:
            first, num_taken = victims.take(count, self._size.num_staged)
            if self._host.group.arena.keeper is not None:
                self._keep(victims.listed[first : first + num_taken])
            leaving = self._leaving.next()
            self._launch(
                haul_kernels.evict_listed, num_taken,
                victims.listed, first, num_taken, victims.latest, *index.memory, last_used, self.homes,
                self._host.chunks_there(), leaving.slots, leaving.rows,
            )  # fmt: skip
            self._add_later(leaving, num_taken)
            count -= num_taken

    def write_back(self, num_records: int, last_read: int) -> list[Future[Added]]:
        """Write the rows of all records back, but those made for batches after ``last_read``."""
        jobs = []
        for first in range(0, num_records, self._size.num_staged):
            leaving, count = self._leaving.next(), min(self._size.num_staged, num_records - first)
            self._keep(torch.arange(first, first + count, device=self.homes.device))
            self._launch(
                haul_kernels.write_back, count,
                first, count, last_read, self.homes, self._host.chunks_there(), leaving.slots, leaving.rows,
            )  # fmt: skip
            jobs.append(self._add_later(leaving, count))
        return jobs

    def _keep(self, records: Tensor) -> None:
        """Before host rows of these records are overwritten: let a running snapshot copy them."""
        arena = self._host.group.arena
        if arena.keeper is not None:
            homes = self.homes[records].cpu().numpy()
            arena.before_change(homes[homes >= 0])

    def _add_later(self, leaving: LeavingRows, count: int) -> Future[Added]:
        added = self._thread.submit(self._add, leaving, count, self._lanes.planning.mark())
        leaving.taken = added
        return added

    def list(self, most: int) -> ListedRows:
        """Return room for a list of the rows that a batch lacks."""
        listed = self._listed.next()
        if listed.most < most:
            listed.reserve(most + most // 4)
        return listed

    def fetch(self, listed: ListedRows, number: int) -> Future[Fetched]:
        """Start to fetch the rows of a batch, which the card lists."""
        fetched = self._thread.submit(self._fetch, listed, number, self._lanes.planning.mark())
        listed.taken = fetched
        return fetched

    def fetch_nothing(self) -> Future[Fetched]:
        """The same for a batch whose rows are all there, or on their way."""
        ready = self._lanes.planning.mark()
        return self._thread.submit(lambda: Fetched(ready, np.zeros(self._num_tables, np.int64)))

    # In the thread that looks up host memory.

    def _add(self, leaving: LeavingRows, count: int, written: Event) -> Added:
        """Add rows that host memory lacks."""
        settle(written)
        slots = leaving.slots[:count].numpy()
        num_written = int(np.count_nonzero(slots != haul_kernels.STAYED.value))
        self.counts.num_written += num_written
        self.counts.bytes_from_card += num_written * self._arena.record_bytes + slots.nbytes
        homeless = np.flatnonzero(slots >= 0)
        if not len(homeless):
            return Added(homeless, homeless)
        slots = slots[homeless]
        locations, num_added = self._host.add(slots, leaving.rows.numpy()[homeless])
        self.num_homeless -= num_added
        return Added(slots, locations)

    def _fetch(self, listed: ListedRows, number: int, planned: Event) -> Fetched:
        settle(planned)
        columns = listed.columns()
        slots, keys, tables, locations, new = columns.numpy()
        self.num_listed = count = len(slots)
        made = np.zeros(self._num_tables, np.int64)
        self._host.find(tables, keys, locations)
        absent = np.flatnonzero(locations < 0)
        new[: len(absent)] = absent
        self.counts.num_fetched += count - len(absent)
        self.counts.num_made += len(absent)
        self.counts.bytes_from_card += 3 * slots.nbytes
        self.counts.bytes_to_card += 2 * slots.nbytes + (count - len(absent)) * self._arena.record_bytes
        lane = self._lanes.fetching
        with lane.use():
            self._launch(
                haul_kernels.fetch_rows, min(count, _MOST_PROGRAMS * rows_together(self._arena.dim)),
                columns[0], columns[3], count, -1 - number, self.homes, self._host.chunks_there(),
            )  # fmt: skip
            if len(absent):
                self._host.name(slots[absent], tables[absent], keys[absent])
                listed.all[0] = len(absent)
                self._make(columns[1], columns[2], columns[0], columns[4][: len(absent)], listed.all[:1])
                made += np.bincount(tables[absent], minlength=len(made))
        listed.used = lane.mark()
        return Fetched(listed.used, made)

    def _launch(self, kernel: Any, count: int, *given: Any) -> None:
        """Start a kernel over rows of the card and of host memory."""
        arena, host = self._arena, self._host.group.arena
        block = rows_together(arena.dim)
        kernel[grid_of(count, block)](
            *given, *arena.memory,
            DIM=arena.dim, COLUMNS=columns_of(arena.dim), STATE=arena.state_width,
            STATE_COLUMNS=columns_of(arena.state_width), SHIFT=arena.shift, HOST_SHIFT=host.shift,
            RECORD_BYTES=arena.record_bytes, BLOCK=block,
        )  # fmt: skip
