"""Row requests of evaluation: workers read flushed rows that no plan gives them.

Training needs no requests, since every rank knows the plan. Evaluation reads other samples, so workers ask.
In a round, each worker sends every home the number of rows it needs of each table, then their keys; the home
answers with a bit for each row that it knows, then with the values of those rows. Both ends know the size of
every message. Nothing is inserted: a row that no home knows stays unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.runtime.row_memory import RowMemory
from rowhaul.schedule.sizes import RowSizes
from rowhaul.schedule.topology import Topology, homes_of
from rowhaul.store import TableGroup
from rowhaul.store.keyed import copy_in, copy_out, locate, locate_or_add
from rowhaul.transport.base import Bytes, Links, swap

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ASKS, ENDED, FAILED = range(3)  # the state of a worker, at the head of each of its rounds


@dataclass(frozen=True)
class Rows:
    """Distinct rows by table and key."""

    tables: Ints
    keys: Ints

    def __len__(self) -> int:
        return len(self.keys)

    def some(self, chosen: npt.NDArray[Any]) -> Rows:
        """Select rows, in the order given."""
        return Rows(self.tables[chosen], self.keys[chosen])


@dataclass(frozen=True)
class FoundRows:
    """The rows that homes knew, and their values back to back."""

    rows: Rows
    lengths: Ints  # bytes of each row's values
    values: Bytes

    def write_to(self, memory: RowMemory) -> None:
        """Add these rows to a memory, whose records may hold values only."""
        offsets = np.cumsum(self.lengths) - self.lengths
        for number, places, positions in memory.by_group(self.rows.tables):
            group = memory.groups[number]
            locations, _ = locate_or_add(group, positions, self.rows.keys[places])
            copy_in(group, locations, self.lengths[places], offsets[places], self.values)


def missing_rows(memory: RowMemory, rows: Rows) -> Rows:
    """Select the rows that a memory does not have."""
    absent = np.zeros(len(rows), np.bool_)
    for number, places, positions in memory.by_group(rows.tables):
        absent[places] = locate(memory.groups[number], positions, rows.keys[places]) < 0
    return rows.some(absent)


class FlushedRows:
    """The rows of which a store is the home, as they are between two segments; reading creates none."""

    def __init__(self, home: RowMemory, flushed: RowMemory) -> None:
        self._memories = (flushed, home)  # rows without a flushed copy are up to date at home
        self._value_bytes = np.array(home.layout.sizes().values, np.int64)

    def look_up(self, rows: Rows) -> tuple[Bools, Bytes]:
        """Return which rows are known, and their values back to back."""
        known = np.zeros(len(rows), np.bool_)
        held: list[tuple[TableGroup, Ints, Ints]] = []
        for memory in self._memories:
            rest = np.flatnonzero(~known)
            for number, some, positions in memory.by_group(rows.tables[rest]):
                places = rest[some]
                locations = locate(memory.groups[number], positions, rows.keys[places])
                found = locations >= 0
                known[places[found]] = True
                held.append((memory.groups[number], places[found], locations[found]))
        lengths = np.where(known, self._value_bytes[rows.tables], 0)
        offsets = np.cumsum(lengths) - lengths
        values = np.empty(int(lengths.sum()), np.uint8)
        for group, places, locations in held:
            copy_out(group, locations, lengths[places], offsets[places], values)
        return known, values


class RowLookups:
    """Rounds of requests and answers, which all ranks join until `is_over`, in their moves threads.

    Args:
        rank: this one.
        topology: which ranks ask and which answer.
        sizes: bytes of a row of each table.
        flushed: the rows that this rank answers with; None on a rank that stores nothing.
    """

    def __init__(self, rank: int, topology: Topology, sizes: RowSizes, flushed: FlushedRows | None) -> None:
        self._topology, self._flushed = topology, flushed
        self._value_bytes = np.array(sizes.values, np.int64)
        self._homes = range(topology.first_store, topology.first_store + topology.num_shards)
        self._asks = rank < topology.num_workers
        self._served = list(range(topology.num_workers)) if flushed is not None else []

    @property
    def is_over(self) -> bool:
        """Whether this rank has nothing to ask and no worker to answer."""
        return not self._asks and not self._served

    def finish(self, links: Links, *, failed: bool = False) -> None:
        """Ask nothing more, and answer other workers while they ask; after a failure all ranks stop."""
        while not self.is_over:
            self.exchange(links, None, failed=failed)

    def exchange(self, links: Links, rows: Rows | None, *, failed: bool = False) -> FoundRows | None:
        """Run one round: request rows, or None to stop asking, and answer other workers.

        Returns the rows found, or None if none were requested or a worker has failed.
        """
        parts = self._by_home(rows) if self._asks and rows is not None else {}
        state = ASKS if parts else FAILED if failed else ENDED
        answers, stops = self._hear(links, state, parts)
        bits = swap(
            links,
            {home: 1 + -(-len(part) // 8) for home, part in parts.items()},
            {
                worker: np.concatenate([np.array([stops], np.uint8), np.packbits(known)])
                for worker, (known, _) in answers.items()
            },
        )
        found = {
            home: part.some(np.unpackbits(bits[home][1:], count=len(part)).astype(np.bool_))
            for home, part in parts.items()
        }
        lengths = {home: self._value_bytes[part.tables] for home, part in found.items()}
        values = swap(
            links,
            {home: int(each.sum()) for home, each in lengths.items()},
            {worker: values for worker, (_, values) in answers.items()},
        )
        self._asks = bool(parts)
        if stops or any(one[0] for one in bits.values()):
            self._asks, self._served = False, []
        if not self._asks:
            return None
        rows = Rows(
            np.concatenate([part.tables for part in found.values()]),
            np.concatenate([part.keys for part in found.values()]),
        )
        return FoundRows(rows, np.concatenate([*lengths.values()]), np.concatenate([*values.values()]))

    def _hear(
        self, links: Links, state: int, parts: dict[int, Rows]
    ) -> tuple[dict[int, tuple[Bools, Bytes]], bool]:
        """Send requests, and look up what the workers request; return also whether one of them has failed."""
        num_tables = len(self._value_bytes)
        headers = {}
        for home in self._homes if self._asks else ():
            counts = np.bincount(parts[home].tables, minlength=num_tables) if parts else np.zeros(num_tables)
            headers[home] = np.array([state, *counts], np.int64).view(np.uint8)
        heard = swap(links, dict.fromkeys(self._served, 8 * (1 + num_tables)), headers)
        states = {worker: int(header.view(np.int64)[0]) for worker, header in heard.items()}
        self._served = [worker for worker in self._served if states[worker] == ASKS]
        counts_of = {worker: heard[worker].view(np.int64)[1:] for worker in self._served}
        keys = swap(
            links,
            {worker: 8 * int(counts.sum()) for worker, counts in counts_of.items()},
            {home: part.keys.view(np.uint8) for home, part in parts.items()},
        )
        answers = {}
        for worker, counts in counts_of.items():
            assert self._flushed is not None
            tables = np.repeat(np.arange(num_tables), counts)
            answers[worker] = self._flushed.look_up(Rows(tables, keys[worker].view(np.int64)))
        return answers, FAILED in states.values()

    def _by_home(self, rows: Rows) -> dict[int, Rows]:
        """The rows to request from each home, ordered by table."""
        homes = homes_of(rows.tables, rows.keys, self._topology)
        order = np.lexsort((rows.tables, homes))
        bounds = np.searchsorted(homes[order], np.arange(self._homes.start, self._homes.stop + 1))
        return {
            home: rows.some(order[first:last])
            for home, (first, last) in zip(self._homes, pairwise(bounds.tolist()), strict=True)
        }
