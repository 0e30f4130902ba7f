"""`CachedTables`: tables of one row size of which a card holds the rows used last, and host memory all.

A batch is *planned* before it is read: its rows are found on the card, the missing ones get the records of
rows used longest ago, these go back to host memory, and those are fetched from there. Rows of batches that
are planned and not finished stay. So plans touch no row that training uses at that time, and training goes on
beside them. What goes to and from host memory goes through one thread, in the order of plans: a row that was
written back is read as it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowhaul.device.arena import DeviceArena
from rowhaul.device.batches import Ids
from rowhaul.device.cache_counts import CacheCounts
from rowhaul.device.cache_size import NUM_STAGED, CacheSize
from rowhaul.device.copy_kernels import list_rows, mark_used
from rowhaul.device.host_tables import HostTables
from rowhaul.device.index import DeviceIndex
from rowhaul.device.lanes import Event, Lanes, Listener, settle
from rowhaul.device.launch import grid_of
from rowhaul.device.staging import Staging, StagingRing
from rowhaul.device.tables import DeviceTables
from rowhaul.device.victims import Victims
from rowhaul.optim import RowOptimizerRule
from rowhaul.store import TableGroup, TableSpec

Int64s = npt.NDArray[np.int64]
_BLOCK = 1024
NUM_NEW, NUM_MISSING = 4, 5  # of the index's facts
_HOMELESS = -1  # a row that host memory does not have yet


@dataclass(frozen=True)
class Fetched:
    """What a plan brought to the card."""

    ready: Event  # when its rows are there
    made: Int64s  # rows by table that nobody had before


@dataclass(frozen=True)
class Plan:
    """Where the rows of a batch are, once they are fetched."""

    records: Tensor
    fetched: Future[Fetched]


@dataclass(frozen=True)
class _Missing:
    """The distinct rows of a batch that the card lacks, by table and key; and which ids name them."""

    keys: Tensor
    tables: Tensor
    ids: Tensor
    row_of_id: Tensor


class CachedTables(DeviceTables):
    """Tables of one row size; the card holds as many rows as fit into ``num_bytes``.

    Args:
        tables: names, row size and initial ranges.
        optimizer: of rows.
        dtype: of values and state.
        seed: of first values.
        device: the card.
        num_bytes: on the card, for records, index and staging buffers.
        lanes: streams to work on.
        hauling: the thread that reads and writes host memory.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: RowOptimizerRule,
        dtype: torch.dtype,
        seed: int,
        device: torch.device,
        num_bytes: int,
        lanes: Lanes,
        hauling: Executor,
    ) -> None:
        self.host = HostTables(TableGroup(tables, optimizer, str(dtype).removeprefix("torch."), seed))
        dim, width = tables[0].dim, self.host.group.width
        self.size = size = CacheSize.within(num_bytes, width * dtype.itemsize)
        self.num_bytes, self._lanes, self._hauling = num_bytes, lanes, hauling
        self.index = DeviceIndex(device, size.num_places)
        self.arena = DeviceArena(dim, width - dim, dtype, device, size.shift)
        self.arena.reserve(max(size.num_records, 1))
        self._last_used = torch.zeros(max(size.num_records, 1), dtype=torch.int32, device=device)
        self._listener = Listener(device)
        self._victims = Victims(self._last_used, self._listener)
        ring = NUM_STAGED // 2, size.num_staged, width, dtype, device
        self._leaving, self._arriving = StagingRing(*ring), StagingRing(*ring)
        self._planned, self._hauled = CacheCounts(), CacheCounts()  # by the two threads
        super().__init__(tables, optimizer, dtype, seed, device)

    @property
    def counts(self) -> CacheCounts:
        """What was done so far."""
        return self._planned + self._hauled

    def clear(self) -> None:
        """Forget every row."""
        self.host.group.clear()
        self.forget_card()

    def forget_card(self) -> None:
        """Empty the card."""
        self.index.clear()
        self._last_used.zero_()
        self._victims.clear()
        self._names = np.zeros((self.size.num_records, 2), np.int64)  # key and table by record
        # Where rows are in host memory; and the batch that a row was made for which is not there yet.
        self._homes = np.full((self.size.num_records, 2), _HOMELESS)
        self.num_used = 0  # records that have ever held a row
        self._free = np.empty(0, np.int64)  # those that hold none now
        self.num_homeless = np.zeros(len(self.tables), np.int64)  # rows by table that host memory lacks

    @property
    def allocated_bytes(self) -> int:
        """Bytes on the card."""
        rings = self._leaving.allocated_bytes + self._arriving.allocated_bytes
        return super().allocated_bytes + self._last_used.nbytes + rings

    # Planning, on its own stream.

    def plan(self, ids: Ids, number: int, oldest: int, finished: Callable[[], Event]) -> Plan | None:
        """Give every row of a batch a record; None if batches from ``oldest`` on leave no room.

        ``finished`` returns an event after all that was done with rows of the batches before that one.
        """
        records = self.index.find(ids.keys, ids.tables)
        self._mark(records, number)
        missing = self.index.list_missing(records)
        num_missing = int(self._listener.hear(self.index.facts)[NUM_MISSING])
        self._planned.num_ids += len(records)
        if not num_missing:
            ready = self._lanes.planning.mark()
            return Plan(records, self._hauling.submit(self._nothing_fetched, ready))
        if not self._make_room(ids, num_missing, oldest, finished):
            self._planned.num_ids -= len(records)
            return None
        self._planned.num_missing += num_missing
        new = self.index.number_listed(ids.keys, ids.tables, missing, records)
        self._mark(records, number)
        listed = torch.empty((3, num_missing), dtype=torch.int64, device=self.device)
        list_rows[grid_of(num_missing, _BLOCK)](
            new, self.index.facts[NUM_NEW : NUM_NEW + 1], records, ids.keys, ids.tables, listed, num_missing,
            BLOCK=_BLOCK,
        )  # fmt: skip
        facts, rows = self._listener.hear_each(self.index.facts, listed)
        num_new = int(facts[NUM_NEW])
        num_reused = min(num_new, len(self._free))
        self._free = self._free[: len(self._free) - num_reused]
        self.num_used += num_new - num_reused
        return Plan(records, self._fetch(listed[:, :num_new], rows[:, :num_new].copy(), number))

    def _make_room(self, ids: Ids, num_missing: int, oldest: int, finished: Callable[[], Event]) -> bool:
        """Free a record for each missing row of a batch; return whether there is room for all of them."""
        num_free = len(self._free) + self.size.num_records - self.num_used
        num_keys = self.num_used - len(self._free)
        if num_missing > num_free:
            victims = self._victims.take(num_missing - num_free, oldest)
            if victims is None:  # several ids may name one row: how many rows are they?
                num_missing = self.count_missing(ids)
                victims = self._victims.take(max(num_missing - num_free, 0), oldest)
                if victims is None:
                    return False
            num_keys -= len(victims)
            if len(victims):
                self._evict(victims, finished())
        self.index.sweep_for(num_keys, num_missing)
        return True

    def num_pinned(self, oldest: int) -> int:
        """Count the records that batches from ``oldest`` on use."""
        return int((self._last_used >= oldest).sum())

    def count_missing(self, ids: Ids) -> int:
        """Count the rows of a batch that the card lacks."""
        absent = torch.nonzero(self.index.find(ids.keys, ids.tables) < 0).reshape(-1)
        return len(self._missing(ids, absent).keys) if len(absent) else 0

    def _mark(self, records: Tensor, number: int) -> None:
        mark_used[grid_of(len(records), _BLOCK)](records, self._last_used, number, len(records), BLOCK=_BLOCK)

    def _missing(self, ids: Ids, which: Tensor) -> _Missing:
        keys, tables = ids.keys[which], ids.tables[which]
        order = torch.argsort(keys, stable=True)
        order = order[torch.argsort(tables[order], stable=True)]
        keys, tables = keys[order], tables[order]
        is_first = torch.ones(len(keys), dtype=torch.bool, device=self.device)
        is_first[1:] = (keys[1:] != keys[:-1]) | (tables[1:] != tables[:-1])
        row_of_id = torch.cumsum(is_first, 0) - 1
        first = torch.nonzero(is_first).reshape(-1)
        return _Missing(keys[first], tables[first], which[order], row_of_id)

    def _evict(self, slots: Int64s, finished: Event) -> None:
        """Send records back to host memory; they are free then."""
        names = np.ascontiguousarray(self._names[slots].T)
        self._free = np.concatenate([self._free, slots])
        num_free = len(self._free)
        told = self._listener.tell(np.concatenate([[num_free], self._free, names.reshape(-1)]))
        free, (keys, tables) = told[1 : num_free + 1], told[num_free + 1 :].view(2, -1)
        victims = free[num_free - len(slots) :]
        self._mark(victims, 0)
        self._lanes.planning.wait(finished)
        self._write_back(victims, slots, names)
        self.index.replace_free(keys, tables, free, told[:1])
        self._planned.bytes_to_card += told.nbytes

    def _write_back(self, records: Tensor, slots: Int64s, names: Int64s) -> list[Future[None]]:
        """Copy records to host memory, a staging buffer at a time, and have them written there."""
        jobs = []
        for first in range(0, len(slots), self.size.num_staged):
            some = slice(first, first + self.size.num_staged)
            staging, count = self._leaving.next(), len(slots[some])
            self.arena.read(records[some], staging.there[:count])
            self._lanes.writing.wait(self._lanes.planning.mark())
            with self._lanes.writing.use():
                staging.here[:count].copy_(staging.there[:count], non_blocking=True)
            copied = self._lanes.writing.mark()
            staging.taken = self._hauling.submit(self._write, slots[some], names[:, some], staging, copied)
            jobs.append(staging.taken)
        self._planned.num_written += len(slots)
        self._planned.bytes_from_card += len(slots) * self.arena.record_bytes
        return jobs

    def _fetch(self, there: Tensor, listed: Int64s, number: int) -> Future[Fetched]:
        """Start to fetch rows into their records; both arguments list records, keys and tables."""
        self._names[listed[0]] = listed[1:].T
        self._planned.bytes_from_card += listed.nbytes
        return self._hauling.submit(self._fetch_listed, there, listed, number, self._lanes.planning.mark())

    # In the thread that reads and writes host memory.

    def _write(self, slots: Int64s, names: Int64s, staging: Staging, copied: Event) -> None:
        (keys, tables), homes = names, self._homes[slots, 0]
        homeless = np.flatnonzero(homes < 0)
        settle(copied)
        locations = self.host.write(tables, keys, homes, staging.rows(len(slots)))
        if len(homeless):
            self._homes[slots[homeless], 0] = locations[homeless]
            self.num_homeless -= np.bincount(tables[homeless], minlength=len(self.tables))

    def _fetch_listed(self, there: Tensor, listed: Int64s, number: int, planned: Event) -> Fetched:
        slots, keys, tables = listed
        records = there[0]
        homes = np.full((len(slots), 2), number)
        lane, num_known = self._lanes.fetching, 0
        lane.wait(planned)
        with lane.use():
            for first in range(0, len(slots), self.size.num_staged):
                some = slice(first, first + self.size.num_staged)
                staging = self._arriving.next()
                found, known = self.host.fetch(tables[some], keys[some], staging.rows(len(slots[some])))
                homes[some, 0] = found
                if len(known):
                    staging.there[: len(known)].copy_(staging.here[: len(known)], non_blocking=True)
                    chosen = records[some]
                    if len(known) < len(chosen):
                        chosen = chosen[torch.from_numpy(known).to(self.device)]
                    self.arena.write(chosen, staging.there[: len(known)])
                    staging.used = lane.mark()
                    num_known += len(known)
            self._homes[slots] = homes
            new = np.flatnonzero(homes[:, 0] < 0)
            if len(new):
                which = torch.from_numpy(new.astype(np.int32)).to(self.device)
                count = torch.tensor([len(new)]).to(self.device)
                self._write_initial(there[1], there[2], records, which, count, self.arena)
            lane.keep(there)
        self._hauled.num_fetched += num_known
        self._hauled.num_made += len(new)
        self._hauled.bytes_to_card += num_known * self.arena.record_bytes + 4 * len(new)
        made = np.bincount(tables[new], minlength=len(self.tables))
        return Fetched(lane.mark(), made)

    def _nothing_fetched(self, ready: Event) -> Fetched:
        return Fetched(ready, np.zeros(len(self.tables), np.int64))

    # All rows, while nothing is planned.

    def settle(self, last_read: int) -> None:
        """Write every row of the card to host memory, but those made for batches after ``last_read``."""
        jobs = []
        with self._lanes.planning.use():
            for first in range(0, self.num_used, self.size.num_staged):
                slots = np.arange(first, min(first + self.size.num_staged, self.num_used))
                slots = np.setdiff1d(slots[self._exists(slots, last_read)], self._free)
                there = torch.from_numpy(slots).to(self.device)
                jobs += self._write_back(there, slots, np.ascontiguousarray(self._names[slots].T))
        for one in jobs:
            one.result()

    def _exists(self, slots: Int64s, last_read: int) -> npt.NDArray[np.bool_]:
        """Whether rows of the card are more than plans: a batch up to ``last_read`` uses them."""
        homes = self._homes[slots]
        exists: npt.NDArray[np.bool_] = (homes[:, 0] >= 0) | (homes[:, 1] <= last_read)
        return exists

    def look(self, ids: Ids, last_read: int) -> tuple[Tensor, Tensor, Tensor]:
        """Copy the values of a batch's rows, wherever they are, without bringing any to the card.

        Returns records as kernels read them from what is returned with them (see `row_kernels`), and the ids
        that have no row.
        """
        records = self.index.find(ids.keys, ids.tables)
        slots, row_of_id = torch.unique(records, return_inverse=True)
        listed = slots.cpu().numpy().astype(np.int64)
        there = listed >= 0
        there[there] = self._exists(listed[there], last_read)
        cached = torch.from_numpy(there).to(self.device)
        values = self.arena.read(torch.where(cached, slots, 0).to(torch.int64))[:, : self.dim]
        records = -1 - row_of_id.to(torch.int32)
        elsewhere = torch.nonzero(~cached[row_of_id]).reshape(-1)
        if not len(elsewhere):
            return records, values.contiguous(), elsewhere
        missing = self._missing(ids, elsewhere)
        rows = np.empty((len(missing.keys), self.host.group.width), self.host.group.dtype)
        tables, keys = missing.tables.to(torch.int64).cpu().numpy(), missing.keys.cpu().numpy()
        _, known = self.host.fetch(tables, keys, rows)
        place = np.full(len(keys), -1)
        place[known] = np.arange(len(known))
        places = torch.from_numpy(place).to(self.device)[missing.row_of_id]
        records[missing.ids] = (-1 - len(values) - places).to(torch.int32)
        more = torch.from_numpy(rows[: len(known), : self.dim]).to(self.device)
        return records, torch.cat([values, more]), missing.ids[places < 0]

    # Whole tables: those of host memory, once the card's rows are written there.

    @property
    def memory_version(self) -> tuple[int, int]:
        """Never changes: all memory is there from the beginning."""
        return 0, self.size.num_records

    def num_rows(self, table: int) -> int:
        """Count the rows of a table."""
        return int(self.host.group.index.num_keys[table] + self.num_homeless[table])

    def blocks(self, table: int) -> Iterator[tuple[Int64s, npt.NDArray[Any]]]:
        """All rows of a table as blocks of (keys, records)."""
        return self.host.group.blocks(table)

    def load(self, table: int, keys: Int64s, contents: npt.NDArray[Any]) -> None:
        """Set rows of a table in host memory; the card must hold none."""
        self.host.group.load(table, keys, contents)

    load_stored = load
