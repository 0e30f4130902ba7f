"""Pulls, pushes and updates: payloads whose sizes both ends know from the ticket's prefetch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.database.distributed.buffers import Buffers
from rowhaul.database.distributed.calls import Calls, RefusedError, subject_of
from rowhaul.database.distributed.ring import wait_for
from rowhaul.database.distributed.routes import Route
from rowhaul.database.leases import Lease
from rowhaul.database.pooled import row_gradients
from rowhaul.database.rows import Rows
from rowhaul.database.stepping import Gradients
from rowhaul.database.tickets import Ticket, TicketError, stale_error
from rowhaul.transport.base import Bytes, Transfer

Floats = npt.NDArray[Any]
OfGroup = Callable[[int, Floats], None]  # group, and the vectors that come from all ranks


@dataclass(frozen=True)
class _Pushed:
    """Gradients on their way here from all ranks, and from here."""

    lease: Lease
    route: Route
    arriving: list[list[Floats]]  # by rank and group
    leaving: list[Floats]  # by group; those of all ranks
    received: list[Transfer]
    sent: list[Transfer]


class Traffic:
    """What the vectors of tickets and their gradients need of the network; calls of one sequence."""

    def __init__(self, calls: Calls, dtype: npt.DTypeLike) -> None:
        self._calls = calls
        self._pushed: list[_Pushed] = []
        self._buffers = Buffers(dtype)

    @property
    def is_waiting(self) -> bool:
        """Whether something was pushed that no update has used."""
        return bool(self._pushed)

    def forget(self) -> None:
        """Drop what was pushed."""
        self._pushed.clear()

    def pull(self, rows: Rows, ticket: Ticket[Route], route: Route, fill: OfGroup) -> None:
        """Get the vectors of every group from the ranks that store them, and hand them to ``fill``."""
        with self._calls.call():
            arriving = self._for_all_ranks(rows, route)
            received = self._calls.ring.await_payloads(self._by_rank(route, arriving))
            leaving = self._for_served(rows, route)
            stale = self._compare("pull", ticket, rows, route, lambda: self._read(rows, route, leaving))
            sent = self._calls.ring.send(lambda rank: _messages(leaving[rank]))
            wait_for(received)
            if stale is None:
                for group, vectors in enumerate(arriving):
                    fill(group, vectors)
            wait_for([], sent)
            self._buffers.give_back(arriving + _flat(leaving))
            if stale is not None:
                raise RefusedError(stale)

    def push(self, rows: Rows, ticket: Ticket[Route], route: Route, fill: OfGroup) -> None:
        """Send gradients, which ``fill`` writes, to where the rows are; does not wait for them."""
        with self._calls.call():
            arriving = self._for_served(rows, route)
            received = self._calls.ring.await_payloads([_messages(of_rank) for of_rank in arriving])
            leaving = self._for_all_ranks(rows, route)

            def fill_all() -> None:
                for group, gradients in enumerate(leaving):
                    fill(group, gradients)

            stale = self._compare("push", ticket, rows, route, fill_all)
            if stale is None:
                ticket.use_up(rows)
            by_rank = self._by_rank(route, leaving)
            sent = self._calls.ring.send(lambda rank: by_rank[rank])
            pushed = _Pushed(ticket.lease, route, arriving, leaving, received, sent)
            if stale is not None:  # payloads went their way all the same: the next ones follow them
                wait_for(received)
                self._finish(pushed)
                raise RefusedError(stale)
            self._pushed.append(pushed)

    def update(self, rows: Rows, lr: float, number: int) -> int:
        """One step with everything pushed, in the order of pushes and of ranks; the rows moved here."""
        with self._calls.call():
            self._calls.tell("update", subject_of(lr))
            self._calls.ring.await_headers()
            for pushed in self._pushed:
                wait_for(pushed.received)
            moved = rows.step(
                [gradients for pushed in self._pushed for gradients in self._given(pushed)], lr, number
            )
            for pushed in self._pushed:
                self._finish(pushed)
            self._pushed.clear()
        return moved

    def _for_all_ranks(self, rows: Rows, route: Route) -> list[Floats]:
        """Room for the vectors that come from all ranks, by group."""
        return [
            self._buffers.take(one.bounds[-1], group.dim)
            for group, one in zip(rows.groups, route, strict=True)
        ]

    def _for_served(self, rows: Rows, route: Route) -> list[list[Floats]]:
        """Room for the vectors that go to every other rank, by rank and group."""
        return [
            [
                self._buffers.take(0 if rank == self._calls.rank else one.served[rank].num_vectors, group.dim)
                for group, one in zip(rows.groups, route, strict=True)
            ]
            for rank in range(self._calls.num_ranks)
        ]

    def _by_rank(self, route: Route, vectors: Sequence[Floats]) -> list[list[Bytes]]:
        """The vectors of all ranks as messages from or to each of them."""
        return [
            _messages(
                [
                    some[one.bounds[rank] : one.bounds[rank + 1]]
                    for one, some in zip(route, vectors, strict=True)
                ]
            )
            for rank in range(self._calls.num_ranks)
        ]

    def _read(self, rows: Rows, route: Route, leaving: Sequence[Sequence[Floats]]) -> None:
        """Fill what goes to the other ranks: rows as they are, sums of bags."""
        for rank, of_rank in enumerate(leaving):
            if rank != self._calls.rank:
                for group, out in enumerate(of_rank):
                    rows.read(group, route[group].served[rank], out)

    def _given(self, pushed: _Pushed) -> list[Gradients]:
        """The gradients of records that a push brought, in the order of ranks."""
        given = []
        for rank, of_rank in enumerate(pushed.arriving):
            for group, (one, arrived) in enumerate(zip(pushed.route, of_rank, strict=True)):
                if rank == self._calls.rank:
                    arrived = pushed.leaving[group][one.bounds[rank] : one.bounds[rank + 1]]
                vectors = one.served[rank]
                given.append(
                    Gradients(pushed.lease, group, None, vectors.locations, row_gradients(vectors, arrived))
                )
        return given

    def _finish(self, pushed: _Pushed) -> None:
        """Use the memory of a push again, which has been received."""
        wait_for([], pushed.sent)
        self._buffers.give_back(pushed.leaving + _flat(pushed.arriving))

    def _compare(
        self, what: str, ticket: Ticket[Route], rows: Rows, route: Route, meanwhile: Callable[[], None]
    ) -> TicketError | None:
        """All ranks mean the same ticket; the error to raise if a row of it is not where it was found."""
        stale = next(
            (
                1 + group
                for group, one in enumerate(route)
                for vectors in one.served
                if rows.is_stale(ticket.lease, group, vectors.locations)
            ),
            0,
        )
        flags = np.full((self._calls.num_ranks, 1), stale)
        heard = self._calls.tell(what, ticket.number, flags, meanwhile)[:, 0]
        self._calls.ring.await_headers()  # the next ones: payloads are awaited already
        if not heard.any():
            return None
        tables = rows.groups[int(heard[np.flatnonzero(heard)[0]]) - 1].tables
        return stale_error(ticket.number, ", ".join(table.name for table in tables))


def _messages(arrays: Sequence[Floats]) -> list[Bytes]:
    return [array.reshape(-1).view(np.uint8) for array in arrays]


def _flat(arrays: Sequence[Sequence[Floats]]) -> list[Floats]:
    return [array for some in arrays for array in some]
