"""Tickets: what a prefetch found, for pulls and one push."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rowhaul.database.leases import Lease
from rowhaul.database.requests import Request, TableKeys
from rowhaul.database.rows import Keys, Rows
from rowhaul.database.vectors import Int64s, Vectors
from rowhaul.errors import RowhaulError

Found = TypeVar("Found")


class TicketError(RowhaulError):
    """A ticket cannot be used: it was pushed, belongs to another database, or its rows are gone."""

    @classmethod
    def of_stale_rows(cls, number: int, table: str) -> TicketError:
        """The error for a ticket whose rows are no longer where they were found."""
        return cls(
            f"rows of ticket {number} (table {table!r}) were deleted or moved after its prefetch; "
            "prefetch again"
        )


class Ticket(Generic[Found]):
    """The rows of a prefetch, which may still be running; good for any number of pulls, then one push.

    The records of its rows are not reused until the push is part of an update, or the ticket is dropped.
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
        """Wait until all rows are located; raise the prefetch's error if it failed."""
        self._found.result(timeout_seconds)

    def found(self, owner: object) -> Found:
        """What the prefetch found, if ``owner`` issued the ticket and it was not pushed."""
        self._check(owner)
        return self._found.result()

    def use_up(self, owner: object) -> None:
        """Mark the ticket as pushed; only one caller succeeds."""
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
                f"ticket {self.number} belongs to another database, or to rows from before a load; "
                "prefetch again"
            )


@dataclass(frozen=True)
class GroupRequest:
    """What a request reads from one group of tables."""

    parts: tuple[TableKeys, ...]  # in the order of their tables
    tables: Int64s  # parts: positions in the group
    bounds: Int64s  # parts + 1: where each part's entries begin
    keys: Keys  # distinct
    inverse: npt.NDArray[np.int32]  # entries: which of the keys

    def vectors(self, locations: Int64s) -> Iterator[tuple[TableKeys, Vectors]]:
        """Each part with its vectors, given the locations of all keys."""
        for i, (part, table) in enumerate(zip(self.parts, self.tables, strict=True)):
            first, last = self.keys.starts[table : table + 2]
            inverse = self.inverse[self.bounds[i] : self.bounds[i + 1]]
            relative = inverse - np.int32(first) if first else inverse
            yield part, Vectors(locations[first:last], relative, part.offsets, part.is_mean)


def group_requests(rows: Rows, request: Request) -> list[GroupRequest]:
    """Split a request by group of tables, with the distinct keys of each; some may be empty."""
    found = []
    for number, group in enumerate(rows.groups):
        parts = [part for part in request.parts if rows.places[part.table].group == number]
        parts.sort(key=lambda part: rows.places[part.table].position)
        tables = np.array([rows.places[part.table].position for part in parts], np.int64)
        values = np.concatenate([np.empty(0, np.int64), *(part.keys for part in parts)])
        bounds = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part.keys) for part in parts], out=bounds[1:])
        keys, starts, inverse = group.distinct(values, bounds, tables)
        found.append(GroupRequest(tuple(parts), tables, bounds, Keys(number, keys, starts), inverse))
    return found
