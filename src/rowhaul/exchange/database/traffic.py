"""Pulls, pushes and updates: payloads whose sizes both ends know from the ticket's prefetch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rowhaul.exchange.database.calls import Calls, RefusedError, subject_of
from rowhaul.exchange.database.routing import Route
from rowhaul.exchange.database.vectors import (
    Payload,
    answer_pull,
    asked_counts,
    assemble,
    gradients_from,
    scatter_gradients,
    served_counts,
)
from rowhaul.exchange.transport import Bytes, Transfer
from rowhaul.store.database.leases import Lease
from rowhaul.store.database.rows import Rows
from rowhaul.store.database.tickets import Ticket, stale_error

Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class _Pushed:
    """Gradients on their way here from all ranks."""

    lease: Lease
    route: Route
    arriving: list[Bytes]  # by rank
    transfers: list[Transfer]


class Traffic:
    """What the vectors of tickets and their gradients need of the network; calls of one sequence."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._pushed: list[_Pushed] = []

    @property
    def is_waiting(self) -> bool:
        """Whether something was pushed that no update has used."""
        return bool(self._pushed)

    def forget(self) -> None:
        """Drop what was pushed."""
        self._pushed.clear()

    def pull(self, rows: Rows, ticket: Ticket[Route], route: Route, out: Mapping[str, Floats]) -> None:
        """Fill the vectors of every table."""
        ranks = range(self._calls.num_ranks)
        with self._calls.call():
            self._compare("pull", ticket, rows, route)
            sizes = [Payload(rows, asked_counts(route, rank)).num_bytes for rank in ranks]
            arrived = self._calls.ring.serve(partial(answer_pull, rows, route), sizes)
        parts = [Payload(rows, asked_counts(route, rank), arrived[rank]).parts()[1] for rank in ranks]
        for table in route.tables:
            name = table.part.table
            assemble(rows, table, [of_rank[name] for of_rank in parts], out[name])

    def push(self, rows: Rows, ticket: Ticket[Route], route: Route, gradients: Mapping[str, Floats]) -> None:
        """Send gradients to where the rows are; does not wait for them."""
        with self._calls.call():
            self._compare("push", ticket, rows, route)
            ticket.use_up(rows)
            leaving = scatter_gradients(rows, route, gradients)
            sizes = [
                Payload(rows, served_counts(route, rank)).num_bytes for rank in range(self._calls.num_ranks)
            ]
            arriving, transfers = self._calls.ring.begin(lambda rank: leaving[rank], sizes)
            self._pushed.append(_Pushed(ticket.lease, route, arriving, transfers))

    def update(self, rows: Rows, lr: float, number: int) -> int:
        """One step with everything pushed, in the order of pushes and of ranks; the rows moved here."""
        with self._calls.call():
            self._calls.tell("update", subject_of(lr))
            for pushed in self._pushed:
                for transfer in pushed.transfers:
                    transfer.wait_received()
                    transfer.wait_sent()
            given = [
                gradients
                for pushed in self._pushed
                for rank, data in enumerate(pushed.arriving)
                for gradients in gradients_from(rows, pushed.route, rank, data, pushed.lease)
            ]
            moved = rows.step(given, lr, number)
            self._pushed.clear()
        return moved

    def _compare(self, what: str, ticket: Ticket[Route], rows: Rows, route: Route) -> None:
        """All ranks mean the same ticket, and every row of it is still where it was found."""
        stale = [
            table
            for served in route.served
            for table, vectors in served.items()
            if rows.is_stale(ticket.lease, rows.places[table].group, vectors.locations)
        ]
        names = [spec.name for spec in rows.settings.tables]
        flags = np.full((self._calls.num_ranks, 1), names.index(stale[0]) + 1 if stale else 0)
        heard = self._calls.tell(what, ticket.number, flags)[:, 0]
        if heard.any():
            raise RefusedError(stale_error(ticket.number, names[int(heard[np.flatnonzero(heard)[0]]) - 1]))
