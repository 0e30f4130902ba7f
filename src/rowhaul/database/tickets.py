"""A ticket: what a prefetch found, and what pulls and pushes go by."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from rowhaul.database.leases import Lease
from rowhaul.database.pooled import Vectors
from rowhaul.database.requests import Request, TableKeys
from rowhaul.database.rows import Int64s, Rows
from rowhaul.errors import RowhaulError

Found = TypeVar("Found")


class TicketError(RowhaulError):
    """A ticket cannot be used: pushed before, of another database, or of rows that are gone."""


@dataclass(frozen=True)
class TableRead:
    """Where the rows are that one table's vectors are made of."""

    table: str
    group: int
    vectors: Vectors


class Ticket(Generic[Found]):
    """Rows on their way to being located; used by ``pull`` any number of times, then by one ``push``.

    It keeps the numbers of its rows' records from being used for other rows until it is pushed and the
    push is part of an update, or until the ticket is dropped.
    """

    def __init__(
        self, owner: object, request: Request, lease: Lease, found: Future[Found], number: int
    ) -> None:
        self.request, self.lease, self.number = request, lease, number
        self._owner: object | None = owner
        self._found = found
        self._lock = threading.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether all rows are located, so that a pull does not wait."""
        return self._found.done()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when all rows are located; raises what went wrong meanwhile."""
        self._found.result(timeout_seconds)

    def found(self, owner: object) -> Found:
        """What was located, for the database that gave the ticket and while it has not been pushed."""
        self._check(owner)
        return self._found.result()

    def use_up(self, owner: object) -> None:
        """Mark the ticket as pushed; only one caller can."""
        with self._lock:
            self._check(owner)
            self._owner = None

    def _check(self, owner: object) -> None:
        if self._owner is None:
            raise TicketError(
                f"ticket {self.number} was pushed before: a ticket is good for one push; prefetch again"
            )
        if self._owner is not owner:
            raise TicketError(
                f"ticket {self.number} is of another database, or of rows from before a load; prefetch again"
            )


def stale_error(number: int, table: str) -> TicketError:
    """The rows of a ticket are no longer there."""
    return TicketError(
        f"rows of ticket {number} (table {table!r}) were deleted or moved after its prefetch; prefetch again"
    )


def distinct_keys(
    rows: Rows, parts: list[TableKeys], group: int
) -> tuple[Int64s, Int64s, list[tuple[TableKeys, slice, Vectors]]]:
    """The distinct keys that parts of one group ask for, table by table; and who needs which.

    Each part comes with the slice of the distinct keys that are its table's, and with vectors whose
    locations are still to be found.
    """
    parts = sorted(parts, key=lambda part: rows.places[part.table].position)
    tables = np.array([rows.places[part.table].position for part in parts])
    values = np.concatenate([part.keys for part in parts])
    bounds = np.cumsum([0, *(len(part.keys) for part in parts)])
    keys, starts, inverse = rows.groups[group].distinct(values, bounds, tables)
    located = []
    for part, table, begin, end in zip(parts, tables, bounds[:-1], bounds[1:], strict=True):
        own = slice(int(starts[table]), int(starts[table + 1]))
        relative = inverse[begin:end] - np.int32(own.start) if own.start else inverse[begin:end]
        nowhere = np.empty(own.stop - own.start, np.int64)
        located.append((part, own, Vectors(nowhere, relative, part.offsets, part.is_mean)))
    return keys, starts, located


def by_group(rows: Rows, request: Request) -> dict[int, list[TableKeys]]:
    """The parts of a request by the group that their table is in."""
    groups: dict[int, list[TableKeys]] = {}
    for part in request.parts:
        groups.setdefault(rows.places[part.table].group, []).append(part)
    return groups


def locate(rows: Rows, request: Request) -> list[TableRead]:
    """Find the rows of a request, and make those that are not there; in the order of its parts."""
    reads: dict[str, TableRead] = {}
    for group, parts in by_group(rows, request).items():
        keys, starts, located = distinct_keys(rows, parts, group)
        locations = rows.find_or_make(group, keys, starts)
        for part, own, vectors in located:
            vectors.locations[:] = locations[own]
            reads[part.table] = TableRead(part.table, group, vectors)
    return [reads[part.table] for part in request.parts]
