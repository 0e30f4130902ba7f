"""`CachedTables`: tables of one row size of which a card holds the rows used last, and host memory all.

A batch is *planned* before it is read: its rows are found on the card, the missing ones get the records of
rows used longest ago, these go back to host memory, and those are fetched from there. Rows of batches that
are planned and not finished stay. So plans touch no row that training uses at that time, and training goes on
beside them.

A plan waits for the card once, to learn how many rows are missing. Records for the next batch are freed after
that, as many as this one needed.
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
from rowhaul.device.cache_size import CacheSize
from rowhaul.device.hauling import Fetched, Hauler
from rowhaul.device.host_tables import HostTables
from rowhaul.device.index import (
    BLOCK,
    NEXT_RECORD,
    NUM_FREE,
    NUM_LISTED,
    NUM_MISSING,
    NUM_NEW,
    NUM_REMOVED,
    NUM_REUSED,
    DeviceIndex,
)
from rowhaul.device.lanes import Event, Lanes, Listener
from rowhaul.device.launch import grid_of
from rowhaul.device.plan_kernels import list_rows, look_up
from rowhaul.device.tables import DeviceTables
from rowhaul.device.victims import Victims
from rowhaul.optim import RowOptimizerRule
from rowhaul.store import TableGroup, TableSpec

Int64s = npt.NDArray[np.int64]
_BLOCK = 1024
_TURNS = 2  # batches that room is made for at once

Released = Callable[[bool], tuple[int, Event]]


@dataclass(frozen=True)
class Plan:
    """Where the rows of a batch are, once they are fetched."""

    records: Tensor
    fetched: Future[Fetched]


@dataclass(frozen=True)
class _Facts:
    """Counts of the card's index, as of the last time the host read them."""

    num_used: int  # records that have ever held a row
    num_free: int  # of these, those that hold none
    num_removed: int  # places


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
        num_bytes: on the card, for records, index and notes on both.
        lanes: streams to work on.
        hauling: the thread that looks up host memory.
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
        group = TableGroup(tables, optimizer, str(dtype).removeprefix("torch."), seed)
        dim, width = tables[0].dim, group.width
        self.size = size = CacheSize.within(num_bytes, width * dtype.itemsize)
        self.num_bytes, self._lanes = num_bytes, lanes
        self.host = HostTables(group, size.num_records, device)
        self.index = DeviceIndex(device, size.num_places, max(size.num_records, 1))
        self.arena = arena = DeviceArena(dim, width - dim, dtype, device, size.shift)
        arena.reserve(max(size.num_records, 1))
        self._last_used = torch.zeros(max(size.num_records, 1), dtype=torch.int32, device=device)
        self._listener = Listener(device)
        self._victims = Victims(self.index.facts, self._last_used)
        self.hauler = Hauler(self.host, arena, size, lanes, hauling, self._make)
        self._planned = CacheCounts()
        super().__init__(tables, optimizer, dtype, seed, device)

    @property
    def counts(self) -> CacheCounts:
        """What was done so far."""
        return self._planned + self.hauler.counts

    def clear(self) -> None:
        """Forget every row."""
        self.host.clear()
        self.forget_card()

    def forget_card(self) -> None:
        """Empty the card."""
        self.index.clear()
        self._last_used.zero_()
        self._victims.clear()
        self.hauler.forget_card()
        self.is_empty = True
        self._facts = _Facts(0, 0, 0)

    @property
    def allocated_bytes(self) -> int:
        """Bytes on the card."""
        notes = self._last_used, self.hauler.homes, self._victims.listed
        return super().allocated_bytes + sum(one.nbytes for one in notes)

    def _make(self, keys: Tensor, tables: Tensor, records: Tensor, new: Tensor, num_new: Tensor) -> None:
        self._write_initial(keys, tables, records, new, num_new, self.arena)

    # Planning, on its own stream.

    def plan(self, ids: Ids, number: int, released: Released) -> Plan | None:
        """Give every row of a batch a record; None if other batches leave no room.

        ``released`` returns the oldest batch whose rows must stay, and an event after all that was done
        with rows of those before: at once, or with True those that are over soon, too.
        """
        records = torch.empty(len(ids.keys), dtype=torch.int32, device=self.device)
        missing = torch.empty_like(records)
        facts = self.index.facts
        facts[NUM_NEW : NUM_MISSING + 1].zero_()
        look_up[grid_of(len(records), BLOCK)](
            ids.keys, ids.tables, *self.index.memory, records, missing, self._last_used, number, len(records),
            BLOCK=BLOCK, num_warps=1,
        )  # fmt: skip
        num_missing = self._hear_facts()
        if not num_missing:
            self._planned.num_ids += len(records)
            return Plan(records, self.hauler.fetch_nothing())
        num_most = self._make_room(ids, num_missing, released)
        if num_most is None:
            return None
        self.is_empty = False
        self._planned.num_ids += len(records)
        self._planned.num_missing += num_missing
        new = self.index.number_listed(ids.keys, ids.tables, missing, records)
        self.index.forget_free()
        listed = self.hauler.list(num_most)
        list_rows[grid_of(num_most, _BLOCK)](
            new, facts, records, ids.keys, ids.tables, self._last_used, number, listed.all, listed.most,
            BLOCK=_BLOCK,
        )  # fmt: skip
        plan = Plan(records, self.hauler.fetch(listed, number))
        self._free_ahead(num_most, released)
        return plan

    def _hear_facts(self) -> int:
        """Learn how many records are in use, and free, after all plans so far; returns the missing ids."""
        facts = self._listener.hear(self.index.facts).tolist()
        self._facts = _Facts(
            num_used=facts[NEXT_RECORD],
            num_free=max(facts[NUM_FREE], 0),
            num_removed=facts[NUM_REMOVED] - facts[NUM_REUSED],
        )
        self._victims.heard(facts[NUM_LISTED])
        return int(facts[NUM_MISSING])

    def _make_room(self, ids: Ids, num_missing: int, released: Released) -> int | None:
        """Free a record for each missing row of a batch; returns their number, at most, or None: no room."""
        if not any(self._frees(num_missing, *released(waits)) for waits in (False, True)):
            # Several ids may name one row: how many rows are they?
            num_missing = self.count_missing(ids)
            if num_missing > self._num_unused:
                return None
        facts = self._facts
        self.index.sweep_for(facts.num_used - facts.num_free, num_missing, facts.num_removed)
        self.index.list_free(facts.num_free)
        return num_missing

    @property
    def _num_unused(self) -> int:
        """Records that hold no row, when last heard of."""
        return self._facts.num_free + self.size.num_records - self._facts.num_used

    def _frees(self, count: int, oldest: int, finished: Event) -> bool:
        """Write rows back until so many records are free; returns whether they are."""
        for everything in (False, True):
            while count > (before := self._num_unused):
                self._evict(count - before, oldest, finished, everything=everything)
                self._hear_facts()
                if self._num_unused == before and not self._victims.has_more:
                    break
        return count <= self._num_unused

    def _free_ahead(self, count: int, released: Released) -> None:
        """Free records for batches to come, each like one that lacked ``count`` ids, without waiting."""
        needed = count + count // 8
        unused = self._num_unused - min(count, self.hauler.num_listed)
        if unused < needed:
            wanted = max(needed, min(_TURNS * count, self.size.num_records // 16))
            self._evict(wanted - unused, *released(False), everything=False)

    def _evict(self, count: int, oldest: int, finished: Event, *, everything: bool) -> None:
        """Write about so many rows back to host memory that no batch from ``oldest`` on uses."""
        self._lanes.planning.wait(finished)
        if not self._victims.has_more:
            self._victims.list(count, oldest, everything=everything)
        self.index.facts[NUM_FREE : NUM_FREE + 1].clamp_(min=0)
        self.hauler.evict(self._victims, count, self.index, self._last_used)

    def num_pinned(self, oldest: int) -> int:
        """Count the records that batches from ``oldest`` on use."""
        return int((self._last_used >= oldest).sum())

    def count_missing(self, ids: Ids) -> int:
        """Count the rows of a batch that the card lacks."""
        absent = torch.nonzero(self.index.find(ids.keys, ids.tables) < 0).reshape(-1)
        return len(self._missing(ids, absent).keys) if len(absent) else 0

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

    # All rows, while nothing is planned.

    def settle(self, last_read: int) -> None:
        """Write every row of the card to host memory, but those made for batches after ``last_read``."""
        with self._lanes.planning.use():
            self._hear_facts()
            jobs = self.hauler.write_back(self._facts.num_used, last_read)
            for added in (one.result() for one in jobs):
                slots = torch.from_numpy(added.slots).to(self.device)
                self.hauler.homes[slots] = torch.from_numpy(added.locations).to(self.device, torch.int32)

    def look(self, ids: Ids, last_read: int) -> tuple[Tensor, Tensor, Tensor]:
        """Copy the values of a batch's rows, wherever they are, without bringing any to the card.

        Returns records as kernels read them from what is returned with them (see `row_kernels`), and the ids
        that have no row.
        """
        records = self.index.find(ids.keys, ids.tables)
        slots, row_of_id = torch.unique(records, return_inverse=True)
        cached = (slots >= 0) & self.hauler.exist(slots.clamp(min=0), last_read)
        values = self.arena.read(torch.where(cached, slots, 0).to(torch.int64))[:, : self.dim]
        records = -1 - row_of_id.to(torch.int32)
        elsewhere = torch.nonzero(~cached[row_of_id]).reshape(-1)
        if not len(elsewhere):
            return records, values.contiguous(), elsewhere
        missing = self._missing(ids, elsewhere)
        tables, keys = missing.tables.to(torch.int64).cpu().numpy(), missing.keys.cpu().numpy()
        locations, rows = self.host.look(tables, keys)
        is_known = torch.from_numpy(locations >= 0).to(self.device)
        records[missing.ids] = (-1 - len(values) - missing.row_of_id).to(torch.int32)
        more = torch.from_numpy(rows[:, : self.dim]).to(self.device)
        return records, torch.cat([values, more]), missing.ids[~is_known[missing.row_of_id]]

    # Whole tables: those of host memory, once the card's rows are written there.

    @property
    def memory_version(self) -> tuple[int, int]:
        """Never changes: all memory is there from the beginning."""
        return 0, self.size.num_records

    def num_rows(self, table: int) -> int:
        """Count the rows of a table."""
        return int(self.host.group.index.num_keys[table] + self.hauler.num_homeless[table])

    def blocks(self, table: int) -> Iterator[tuple[Int64s, npt.NDArray[Any]]]:
        """All rows of a table as blocks of (keys, records)."""
        return self.host.group.blocks(table)

    def load(self, table: int, keys: Int64s, contents: npt.NDArray[Any]) -> None:
        """Set rows of a table in host memory; the card must hold none."""
        self.host.group.load(table, keys, contents)

    load_stored = load
