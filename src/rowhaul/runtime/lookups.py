"""Rows asked for by key: how workers read the settled model, which no plan tells them to hold.

Training needs no requests, since every rank knows what moves. Evaluation reads other samples, so here
workers ask. In a round each worker asks every home for the distinct rows of one batch: how many of each
table, then their keys; the home answers with a bit a row, whether it knows it, and then with the values of
those it does. Both ends know the size of every message. Nothing is inserted anywhere: a row that no home
knows stays unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from rowhaul.transport.base import Bytes, Links, Transfer

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ASKS, ENDED, FAILED = range(3)  # what a worker says of itself at the beginning of a round


@dataclass(frozen=True)
class Rows:
    """Rows by table and key, each once."""

    tables: Ints
    keys: Ints

    def __len__(self) -> int:
        return len(self.keys)

    def some(self, chosen: npt.NDArray[Any]) -> Rows:
        """Those chosen, in the order given."""
        return Rows(self.tables[chosen], self.keys[chosen])


@dataclass(frozen=True)
class FoundRows:
    """The rows that homes knew, and their values: of each table as many bytes a row as its rows have."""

    rows: Rows
    lengths: Ints
    offsets: Ints
    values: Bytes

    def write_to(self, memory: RowMemory) -> None:
        """Have these rows in a memory, whose records may be no more than values."""
        for number, places, positions in memory.by_group(self.rows.tables):
            group = memory.groups[number]
            locations, _ = locate_or_add(group, positions, self.rows.keys[places])
            copy_in(group, locations, self.lengths[places], self.offsets[places], self.values)


def missing_rows(memory: RowMemory, rows: Rows) -> Rows:
    """Those rows that a memory does not have."""
    absent = np.zeros(len(rows), np.bool_)
    for number, places, positions in memory.by_group(rows.tables):
        absent[places] = locate(memory.groups[number], positions, rows.keys[places]) < 0
    return rows.some(absent)


class FlushedRows:
    """The rows that a store is home of, as they are between two segments; reading makes none."""

    def __init__(self, home: RowMemory, flushed: RowMemory) -> None:
        self._memories = (flushed, home)  # what is not settled on a copy rests at home
        self._value_bytes = np.array(home.layout.sizes().values, np.int64)

    def look_up(self, rows: Rows) -> tuple[Bools, Bytes]:
        """Which of the rows are known, and the values of those, one after the other."""
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
    """Rounds of questions and answers; all ranks take part until `is_over`, in their move threads.

    Args:
        rank: this one.
        topology: who asks and who answers.
        sizes: bytes of a row of each table.
        settled: the rows that this rank answers for; None on a rank that stores nothing.
    """

    def __init__(self, rank: int, topology: Topology, sizes: RowSizes, flushed: FlushedRows | None) -> None:
        self._rank, self._topology, self._flushed = rank, topology, flushed
        self._value_bytes = np.array(sizes.values, np.int64)
        self._homes = range(topology.first_store, topology.first_store + topology.num_shards)
        self._asks = rank < topology.num_workers
        self._served = list(range(topology.num_workers)) if flushed is not None else []
        self.stopped = False  # because a worker has failed

    @property
    def is_over(self) -> bool:
        """Whether this rank has neither questions nor anyone to answer."""
        return not self._asks and not self._served

    def finish(self, links: Links, *, failed: bool = False) -> None:
        """Ask nothing more, and answer others as long as they ask; after a failure all ranks stop."""
        while not self.is_over:
            self.exchange(links, None, failed=failed)

    def exchange(self, links: Links, rows: Rows | None, *, failed: bool = False) -> FoundRows | None:
        """One round: ask for rows, or for none any more; answer what others ask.

        Returns what was found, or None where nothing was asked, or where a worker has failed.
        """
        messages = _Messages(links, self._rank)
        parts = self._by_home(rows) if self._asks and rows is not None else {}
        state = ASKS if parts else FAILED if failed else ENDED
        answers, has_failed = self._hear(messages, state, parts)
        bits = messages.swap(
            {home: _num_bit_bytes(len(part)) for home, part in parts.items()},
            {worker: _pack(has_failed, known) for worker, (known, _) in answers.items()},
        )
        known = {home: part.some(_unpack(bits[home], len(part))) for home, part in parts.items()}
        lengths = {home: self._value_bytes[part.tables] for home, part in known.items()}
        values = messages.swap(
            {home: int(each.sum()) for home, each in lengths.items()},
            {worker: values for worker, (_, values) in answers.items()},
        )
        messages.wait_sent()
        self._asks = bool(parts)
        if has_failed or any(_says_stop(one) for one in bits.values()):
            self.stopped, self._asks, self._served = True, False, []
        if not self._asks:
            return None
        return _joined(list(known.values()), list(lengths.values()), list(values.values()))

    def _hear(
        self, messages: _Messages, state: int, parts: Mapping[int, Rows]
    ) -> tuple[dict[int, tuple[Bools, Bytes]], bool]:
        """Ask, and find the answers to what the workers ask; also says whether one of them has failed."""
        headers = {home: self._header(state, parts.get(home, _NO_ROWS)) for home in self._homes}
        announced = messages.swap(
            dict.fromkeys(self._served, 8 * (1 + len(self._value_bytes))), headers if self._asks else {}
        )
        numbers = {worker: header.view(np.int64) for worker, header in announced.items()}
        self._served = [worker for worker in self._served if numbers[worker][0] == ASKS]
        keys = messages.swap(
            {worker: 8 * int(numbers[worker][1:].sum()) for worker in self._served},
            {home: _as_bytes(part.keys) for home, part in parts.items()},
        )
        answers = {
            worker: self._answer(numbers[worker][1:], keys[worker].view(np.int64)) for worker in self._served
        }
        return answers, any(header[0] == FAILED for header in numbers.values())

    def _by_home(self, rows: Rows) -> dict[int, Rows]:
        """The rows that each home is asked for, ordered by table."""
        homes = homes_of(rows.tables, rows.keys, self._topology)
        order = np.lexsort((rows.tables, homes))
        bounds = np.searchsorted(homes[order], np.arange(self._homes.start, self._homes.stop + 1))
        return {
            home: rows.some(order[first:last])
            for home, (first, last) in zip(self._homes, pairwise(bounds.tolist()), strict=True)
        }

    def _header(self, state: int, part: Rows) -> Bytes:
        counts = np.bincount(part.tables, minlength=len(self._value_bytes))
        return _as_bytes(np.concatenate([[state], counts]).astype(np.int64))

    def _answer(self, counts: Ints, keys: Ints) -> tuple[Bools, Bytes]:
        assert self._flushed is not None
        return self._flushed.look_up(Rows(np.repeat(np.arange(len(counts)), counts), keys))


class _Messages:
    """The messages of one round; what a rank has for itself does not travel."""

    def __init__(self, links: Links, rank: int) -> None:
        self._links, self._rank = links, rank
        self._transfers: list[tuple[Transfer, Mapping[int, Bytes]]] = []

    def swap(self, sizes: Mapping[int, int], sends: Mapping[int, Bytes]) -> dict[int, Bytes]:
        """Send messages, and receive those of the given sizes."""
        received = {peer: np.empty(size, np.uint8) for peer, size in sizes.items()}
        transfer = self._links.post(
            {peer: data for peer, data in received.items() if peer != self._rank},
            {peer: data for peer, data in sends.items() if peer != self._rank},
        )
        if self._rank in received:
            received[self._rank] = sends[self._rank]
        transfer.wait_received()
        self._transfers.append((transfer, sends))
        return received

    def wait_sent(self) -> None:
        """Wait until everything has left."""
        for transfer, _ in self._transfers:
            transfer.wait_sent()


_NO_ROWS = Rows(np.empty(0, np.int64), np.empty(0, np.int64))


def _as_bytes(numbers: Ints) -> Bytes:
    return np.ascontiguousarray(numbers).view(np.uint8)


def _num_bit_bytes(num_rows: int) -> int:
    return 1 + -(-num_rows // 8)


def _pack(stop: bool, known: Bools) -> Bytes:
    return np.concatenate([np.array([stop], np.uint8), np.packbits(known)])


def _says_stop(bits: Bytes) -> bool:
    return bool(bits[0])


def _unpack(bits: Bytes, num_rows: int) -> Bools:
    return np.unpackbits(bits[1:], count=num_rows).astype(np.bool_)


def _joined(parts: Sequence[Rows], lengths: Sequence[Ints], values: Sequence[Bytes]) -> FoundRows:
    """What all homes have found, as one."""
    rows = Rows(
        np.concatenate([part.tables for part in parts]), np.concatenate([part.keys for part in parts])
    )
    every = np.concatenate(lengths)
    return FoundRows(rows, every, np.cumsum(every) - every, np.concatenate(values))
