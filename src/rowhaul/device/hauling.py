"""Records on their way between a card and host memory, in the order in which plans ask for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rowhaul.device.arena import DeviceArena
from rowhaul.device.cache_counts import CacheCounts
from rowhaul.device.cache_size import NUM_STAGED, CacheSize
from rowhaul.device.host_tables import HostTables
from rowhaul.device.lanes import Event, Lanes, brought, settle
from rowhaul.device.staging import Staging, StagingRing

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Fetched:
    """What a plan brought to the card."""

    ready: Event  # when its rows are there
    made: Int64s  # rows by table that nobody had before


class Hauler:
    """Writes records back to host memory and fetches others, in a thread of its own.

    It does one thing after the other: a row that was written back is read as it was written. What the
    card does is ordered by events: a record is read before it is overwritten, and a buffer is used again when
    both the card and the host are done with it.

    Args:
        host: the rows.
        arena: the card's records.
        size: of the cache.
        lanes: streams to work on.
        thread: where host memory is read and written.
        make: writes the first values of rows to their records, given keys, tables, records, the places of
            new rows among these, and how many there are; all on the card.
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
        ring = NUM_STAGED // 2, size.num_staged, arena.width, arena.torch_dtype, arena.device
        self._leaving, self._arriving = StagingRing(*ring), StagingRing(*ring)
        self._num_tables = len(host.group.tables)
        self._planned, self._hauled = CacheCounts(), CacheCounts()  # by the two threads
        self.forget_card()

    def forget_card(self) -> None:
        """Forget what the card holds."""
        self._host.forget_card()
        self.num_homeless = np.zeros(self._num_tables, np.int64)  # rows by table that host memory lacks

    @property
    def counts(self) -> CacheCounts:
        """What was moved so far."""
        return self._planned + self._hauled

    @property
    def allocated_bytes(self) -> int:
        """Bytes on the card."""
        return self._leaving.allocated_bytes + self._arriving.allocated_bytes

    # In the thread that plans, on its stream.

    def write_back(self, records: Tensor, slots: Tensor, *, evicts: bool = True) -> list[Future[None]]:
        """Copy records to host memory, a staging buffer at a time, and have them written there.

        ``slots`` are their numbers again in host memory, where a copy to it may still be under way.
        """
        jobs = []
        for first in range(0, len(slots), self._size.num_staged):
            some = slice(first, first + self._size.num_staged)
            staging, count = self._leaving.next(), len(slots[some])
            self._arena.read(records[some], staging.there[:count])
            self._lanes.writing.wait(self._lanes.planning.mark())
            with self._lanes.writing.use():
                staging.here[:count].copy_(staging.there[:count], non_blocking=True)
            copied = self._lanes.writing.mark()
            staging.taken = self._thread.submit(self._write, slots[some], staging, copied, evicts)
            jobs.append(staging.taken)
        self._planned.num_written += len(slots)
        self._planned.bytes_from_card += len(slots) * (self._arena.record_bytes + slots.itemsize)
        return jobs

    def fetch(self, listed: Tensor, number: int) -> Future[Fetched]:
        """Start to fetch the rows of a batch, given as `list_rows` lists them."""
        self._planned.bytes_from_card += listed.nbytes
        heard = brought(listed)
        return self._thread.submit(self._fetch, listed, heard, number, self._lanes.planning.mark())

    def fetch_nothing(self) -> Future[Fetched]:
        """The same for a batch whose rows are all there, or on their way."""
        ready = self._lanes.planning.mark()
        return self._thread.submit(lambda: Fetched(ready, np.zeros(self._num_tables, np.int64)))

    # In the thread that reads and writes host memory.

    def _write(self, slots: Tensor, staging: Staging, copied: Event, evicts: bool) -> None:
        settle(copied)
        self.num_homeless -= self._host.write(slots.numpy(), staging.rows(len(slots)), evicts=evicts)

    def _fetch(self, listed: Tensor, heard: Tensor, number: int, planned: Event) -> Fetched:
        settle(planned)
        count = int(heard[0])
        slots, keys, tables = heard[1:].view(3, -1)[:, :count].numpy()
        there = listed[1:].view(3, -1)[:, :count]
        made = np.zeros(self._num_tables, np.int64)
        lane = self._lanes.fetching
        with lane.use():
            for first in range(0, count, self._size.num_staged):
                some = slice(first, first + self._size.num_staged)
                staging = self._arriving.next()
                rows = staging.rows(len(slots[some]))
                found = self._host.fetch(slots[some], tables[some], keys[some], number, rows)
                new = np.flatnonzero(found < 0)
                self._bring(there[:, some], staging, new)
                staging.used = lane.mark()
                made += np.bincount(tables[some][new], minlength=len(made))
            lane.keep(listed)
        return Fetched(lane.mark(), made)

    def _bring(self, there: Tensor, staging: Staging, new: Int64s) -> None:
        """Copy rows to the card, and make the new ones there."""
        records, keys, tables = there
        count = len(records)
        if len(new) < count:
            staging.there[:count].copy_(staging.here[:count], non_blocking=True)
            self._arena.write(records, staging.there[:count])
            self._hauled.bytes_to_card += count * self._arena.record_bytes
        if len(new):
            which, num_new = staging.list_there(new)
            self._make(keys, tables, records, which, num_new)
            self._hauled.bytes_to_card += which.nbytes
        self._hauled.num_fetched += count - len(new)
        self._hauled.num_made += len(new)
