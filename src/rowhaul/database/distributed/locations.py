"""Where rows are: created at the rank that owns their key, deleted, and migrated to other ranks.

When a row migrates, its owner notes the new location; the rank that stores it has it in its own index like
any other row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.database.distributed.calls import Calls
from rowhaul.database.distributed.dividing import owners_of
from rowhaul.database.requests import Request
from rowhaul.database.rows import Keys, Rows
from rowhaul.database.tickets import group_requests
from rowhaul.store.index import KeyIndex
from rowhaul.store.location import RECORD_BITS, rank_of

Int64s = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class Moved:
    """The locations of rows whose keys this rank owns and that another rank stores."""

    def __init__(self, rows: Rows) -> None:
        self._indices = [KeyIndex(len(group.tables)) for group in rows.groups]

    def copy(self) -> Moved:
        """Copy the locations as they are now."""
        return copy.deepcopy(self)

    def find(self, keys: Keys) -> Int64s:
        """Locations of keys, -1 for those that have not moved."""
        index = self._indices[keys.group]
        if not index.num_keys.any():
            return np.full(len(keys.values), -1)
        return index.find(keys.values, keys.starts)[0]

    def set(self, keys: Keys, locations: Int64s) -> None:
        """Note new locations."""
        self.discard(keys)
        self._indices[keys.group].find_or_insert(
            keys.values, keys.starts, lambda absent: locations[absent], lambda records: None
        )

    def discard(self, keys: Keys) -> None:
        """Remove keys that are deleted, or back at their owner."""
        self._indices[keys.group].discard(keys.values, keys.starts)


def at_rank(rank: int, records: Int64s) -> Int64s:
    """The locations of records of one rank."""
    return (rank << RECORD_BITS) | records


def find_or_create(rows: Rows, moved: Moved, rank: int, keys: Keys) -> Int64s:
    """Locations of distinct keys that this rank owns; new rows are created here."""
    locations = moved.find(keys)
    here = locations < 0
    if here.all():
        return at_rank(rank, rows.find_or_create(keys))
    locations[here] = at_rank(rank, rows.find_or_create(keys.where(here)))
    return locations


def delete(calls: Calls, rows: Rows, moved: Moved, request: Request) -> int:
    """Delete the rows of keys that any rank names, wherever they are; return how many existed."""
    num_deleted = 0
    elsewhere = []
    for keys in _named_keys(calls, rows, request, "delete", 0):
        locations = moved.find(keys)
        has_moved = locations >= 0
        num_deleted += rows.delete(keys.where(~has_moved))
        moved.discard(keys.where(has_moved))
        elsewhere.append((keys.where(has_moved), rank_of(locations[has_moved])))
    num_deleted += sum(rows.delete(keys) for keys, *_ in _send(calls, "delete", 0, elsewhere))
    return calls.total("delete", 0, num_deleted)


def migrate(calls: Calls, rows: Rows, moved: Moved, request: Request, target: int) -> int:
    """Store the rows of keys that any rank names on one rank; return how many moved. Skip unknown keys.

    A row is deleted at its old place only when it is known to be at the new one.
    """
    orders = []
    for keys in _named_keys(calls, rows, request, "migrate", target):
        locations = moved.find(keys)
        storing = np.where(locations >= 0, rank_of(locations), calls.rank)
        leaves = (storing != target) & ((locations >= 0) | (rows.find(keys) >= 0))
        orders.append((keys.where(leaves), storing[leaves]))
    leaving = [keys for keys, *_ in _send(calls, "migrate", target, orders)]
    cargo = [
        (keys, np.full(len(keys.values), target), rows.read_records(keys.group, rows.find(keys)))
        for keys in leaving
    ]
    arrived = _send(calls, "migrate", target, cargo)
    placed, _ = calls.attempt("migrate", target, lambda: _store(calls, rows, arrived))
    for keys, locations in _send(calls, "migrate", target, placed):
        if target == calls.rank:
            moved.discard(keys)
        else:
            moved.set(keys, locations)
    return calls.total("migrate", target, sum(rows.delete(keys) for keys in leaving))


def _store(calls: Calls, rows: Rows, arrived: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Add all migrated rows or none; return their keys, owners and new locations."""
    placed = []
    try:
        for keys, records in arrived:
            locations = at_rank(calls.rank, rows.find_or_create(keys, records))
            placed.append((keys, owners_of(keys.values, calls.num_ranks), locations))
    except MemoryError:
        for keys, *_ in placed:
            rows.delete(keys)
        raise
    return placed


def _named_keys(calls: Calls, rows: Rows, request: Request, operation: str, subject: int) -> list[Keys]:
    """The distinct keys, by group, that any rank names and this rank owns."""
    given = [
        (asked.keys, owners_of(asked.keys.values, calls.num_ranks)) for asked in group_requests(rows, request)
    ]
    named = []
    for keys, *_ in _send(calls, operation, subject, given):
        group = rows.groups[keys.group]
        values, starts, _ = group.distinct(keys.values, keys.starts, np.arange(len(group.tables)))
        named.append(Keys(keys.group, values, starts))
    return named


def _send(
    calls: Calls, operation: str, subject: int, given: Iterable[tuple[Any, ...]]
) -> list[tuple[Any, ...]]:
    """Send keys and columns to ranks, given for each group as (keys, rank of each key, column, ...).

    Returns, for each group, the keys and the columns that arrived from all ranks.
    """
    given = list(given)
    messages: list[list[Array]] = []
    for rank in range(calls.num_ranks):
        message: list[Array] = []
        for keys, ranks, *columns in given:
            chosen = ranks == rank
            some = keys.where(chosen)
            message += [some.values, some.tables, *(column[chosen] for column in columns)]
        messages.append(message)
    arrived = [np.concatenate(parts) for parts in zip(*calls.swap(operation, subject, messages), strict=True)]
    merged: list[tuple[Any, ...]] = []
    num_columns = len(arrived) // len(given)
    for i, (keys, *_) in enumerate(given):
        values, tables, *columns = arrived[i * num_columns : (i + 1) * num_columns]
        order = np.argsort(tables, kind="stable")
        starts = np.searchsorted(tables[order], np.arange(len(keys.starts)))
        merged.append((Keys(keys.group, values[order], starts), *(column[order] for column in columns)))
    return merged
