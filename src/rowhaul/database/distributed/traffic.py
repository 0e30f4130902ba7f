"""Pulls, pushes and updates: payloads whose sizes both ends know from the ticket's prefetch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rowhaul.database.distributed.calls import Calls, RefusedError, subject_of, wait_received, wait_sent
from rowhaul.database.distributed.routes import GroupRoute, Route
from rowhaul.database.distributed.routing_kernels import add_gradients
from rowhaul.database.leases import Lease
from rowhaul.database.requests import TableKeys
from rowhaul.database.rows import Rows
from rowhaul.database.tickets import Ticket, TicketError
from rowhaul.database.vectors import Floats, Gradients, row_gradients
from rowhaul.errors import DataError, RowhaulError
from rowhaul.store.pooling import pool_rows
from rowhaul.transport.base import Transfer

Tables = Mapping[str, Floats]  # vectors x dim
OfGroup = Callable[[int, Floats], None]  # group, and the vectors of all ranks
_MAX_BLOCKS = 32  # kept for reuse
_NOT_FINITE = -1  # what a rank tells the others of its gradients
_SLACK = 8  # allocate an eighth more than needed, as the next step may need a little more


@dataclass(frozen=True)
class _Pushed:
    """Gradients in flight, to this rank and from it, by group."""

    lease: Lease
    route: Route
    arriving: list[Floats]
    leaving: list[Floats]
    received: list[Transfer]
    sent: list[Transfer]


class Traffic:
    """Moves the vectors of tickets and their gradients between ranks; calls of one sequence."""

    def __init__(self, calls: Calls, dtype: npt.DTypeLike) -> None:
        self._calls = calls
        self._pushed: list[_Pushed] = []
        self._buffers = _Buffers(dtype)

    @property
    def is_waiting(self) -> bool:
        """Whether pushed gradients wait for an update."""
        return bool(self._pushed)

    @property
    def pushed_bytes(self) -> int:
        """Bytes of pushed gradients that wait for an update, to this rank and from it."""
        pushed = list(self._pushed)  # another thread may push
        return sum(array.nbytes for one in pushed for array in (*one.arriving, *one.leaving))

    def discard_pushed(self) -> None:
        """Drop what was pushed, on all ranks."""
        with self._calls.call():
            self._calls.compare("discard_pushed", 0)
            self._calls.await_headers()
            self._drop_pushed()

    def drop_pushed(self) -> None:
        """Drop what was pushed, as part of another call of all ranks."""
        with self._calls.call():
            self._drop_pushed()

    def forget_pushed(self) -> None:
        """Drop what was pushed without waiting for it: only before the links are closed."""
        self._pushed.clear()

    def pull(self, rows: Rows, ticket: Ticket[Route], route: Route, fill: OfGroup) -> None:
        """Fetch the vectors of every group from the ranks that store them, and pass them to ``fill``."""
        with self._calls.call():
            requested, served = _bounds(route)
            arriving, leaving = self._allocate(rows, requested), self._allocate(rows, served)
            received = self._calls.receive(arriving, requested)

            def read() -> None:
                for group, (one, out) in enumerate(zip(route, leaving, strict=True)):
                    for rank in range(self._calls.num_ranks):
                        if rank != self._calls.rank:
                            rows.read(group, one.served[rank], _of_rank(out, one.served_bounds, rank))

            stale = self._compare("pull", ticket, rows, route, read)
            sent = self._calls.send(leaving, served)
            wait_received(received)
            if stale is None:
                for group, vectors in enumerate(arriving):
                    fill(group, vectors)
            wait_sent(sent)
            self._buffers.give_back(arriving + leaving)
            if stale is not None:
                raise RefusedError(stale)

    def push(
        self,
        rows: Rows,
        ticket: Ticket[Route],
        route: Route,
        fill: OfGroup,
        check: Callable[[], None],
    ) -> None:
        """Send gradients, which ``fill`` writes, to the ranks that store the rows; do not wait for them.

        ``check`` raises a `DataError` where they are not finite.
        """
        with self._calls.call():
            requested, served = _bounds(route)
            arriving, leaving = self._allocate(rows, served), self._allocate(rows, requested)
            received = self._calls.receive(arriving, served)

            def fill_all() -> None:
                for group, gradients in enumerate(leaving):
                    fill(group, gradients)

            wrong = self._compare("push", ticket, rows, route, fill_all, check)
            if wrong is None:
                ticket.use_up(rows)
            sent = self._calls.send(leaving, requested)
            pushed = _Pushed(ticket.lease, route, arriving, leaving, received, sent)
            if wrong is not None:  # the payloads were sent all the same: the next ones follow them
                wait_received(received)
                self._finish(pushed)
                raise RefusedError(wrong)
            self._pushed.append(pushed)

    def update(self, rows: Rows, lr: float) -> int:
        """Apply everything pushed, in the order of pushes and ranks; return the rows moved here."""
        with self._calls.call():
            self._calls.compare("update", subject_of(lr))
            self._calls.await_headers()
            self._receive_all()
            given = [gradients for pushed in self._pushed for gradients in self._gradients(pushed)]
            moved = rows.step(given, lr)
            self._finish_all()
        return moved

    def _allocate(self, rows: Rows, bounds: list[list[int]]) -> list[Floats]:
        """Buffers for vectors, by group."""
        return [
            self._buffers.take(cut[-1], group.dim) for group, cut in zip(rows.groups, bounds, strict=True)
        ]

    def _gradients(self, pushed: _Pushed) -> Iterator[Gradients]:
        """The gradients of records that a push brought, in the order of ranks."""
        for rank in range(self._calls.num_ranks):
            for group, one in enumerate(pushed.route):
                if rank == self._calls.rank:
                    arrived = _of_rank(pushed.leaving[group], one.bounds, rank)
                else:
                    arrived = _of_rank(pushed.arriving[group], one.served_bounds, rank)
                vectors = one.served[rank]
                yield Gradients(pushed.lease, group, None, vectors.locations, row_gradients(vectors, arrived))

    def _drop_pushed(self) -> None:
        # A Gloo buffer that is freed before its message is complete can break the connection.
        self._receive_all()
        self._finish_all()

    def _receive_all(self) -> None:
        for pushed in self._pushed:
            wait_received(pushed.received)

    def _finish_all(self) -> None:
        for pushed in self._pushed:
            self._finish(pushed)
        self._pushed.clear()

    def _finish(self, pushed: _Pushed) -> None:
        """Reuse the memory of a push that was received."""
        wait_sent(pushed.sent)
        self._buffers.give_back(pushed.leaving + pushed.arriving)

    def _compare(
        self,
        what: str,
        ticket: Ticket[Route],
        rows: Rows,
        route: Route,
        meanwhile: Callable[[], None],
        check: Callable[[], None] = lambda: None,
    ) -> RowhaulError | None:
        """Check that all ranks use the same ticket; return an error if any of its rows is no longer there.

        Or where ``check`` raises a `DataError` on any rank.
        """
        flag = next(
            (
                1 + group
                for group, one in enumerate(route)
                for vectors in one.served
                if rows.is_stale(ticket.lease, group, vectors.locations)
            ),
            0,
        )
        own: DataError | None = None
        try:
            check()
        except DataError as error:
            own, flag = error, _NOT_FINITE
        flags = np.full((self._calls.num_ranks, 1), flag)
        heard = self._calls.compare(what, ticket.number, flags, meanwhile)[:, 0]
        self._calls.await_headers()  # the receives of payloads are posted already
        if own is not None or not heard.any():
            return own
        if (heard == _NOT_FINITE).any():
            rank = int(np.argmax(heard == _NOT_FINITE))
            return DataError(f"a gradient of rank {rank} is not finite, see its error; nothing was pushed")
        tables = rows.groups[int(heard[np.flatnonzero(heard)[0]]) - 1].tables
        return TicketError.of_stale_rows(ticket.number, ", ".join(table.name for table in tables))


def fill_tables(rows: Rows, group: int, route: GroupRoute, arrived: Floats, out: Tables) -> None:
    """Write the vectors of every table; rows that this rank stores are read in place."""
    for part, offsets in _parts(route):
        rows.read(group, replace(route.vectors, offsets=offsets, spare=arrived), out[part.table])
        if part.is_mean:
            out[part.table][:] /= _bag_sizes(part, arrived.dtype)


def fill_columns(
    rows: Rows, group: int, route: GroupRoute, arrived: Floats, columns: Mapping[str, int], out: Floats
) -> None:
    """Write the vectors of every table to its columns of one array, with a row for each sample."""
    parts = route.asked.parts
    if not parts:
        return
    arena, vectors = rows.groups[group].arena, route.vectors
    dim = arrived.shape[1]
    with rows.records.shared():
        pool_rows(
            arena.addresses, arena.shift, arena.width, vectors.locations, arrived.ctypes.data,
            vectors.inverse, vectors.offsets, np.array([columns[part.table] for part in parts]), dim,
            np.zeros(len(parts), np.bool_), np.empty(0, out.dtype), out, out.ctypes.data,
        )  # fmt: skip
    for part in parts:
        if part.is_mean:
            first = columns[part.table]
            out[:, first : first + dim] /= _bag_sizes(part, out.dtype)


def sum_gradients(route: GroupRoute, given: Tables, sums: Floats) -> None:
    """Sum the gradients of all vectors for each vector that arrived; they may be columns of a wider array."""
    sums[:] = 0
    for part, offsets in _parts(route):
        gradients = given[part.table]
        if part.is_mean:
            gradients = gradients / _bag_sizes(part, gradients.dtype)
        add_gradients(route.vectors.inverse, offsets, gradients.ctypes.data, gradients.strides[0], sums)


def _parts(route: GroupRoute) -> Iterator[tuple[TableKeys, npt.NDArray[np.int64]]]:
    """Each part of a request, and the offsets of its vectors."""
    offsets = route.vectors.offsets
    assert offsets is not None
    first = 0
    for part in route.asked.parts:
        yield part, offsets[first : first + part.num_vectors + 1]
        first += part.num_vectors


def _bag_sizes(part: TableKeys, dtype: npt.DTypeLike) -> Floats:
    assert part.offsets is not None
    return np.maximum(np.diff(part.offsets), 1).astype(dtype).reshape(-1, 1)


def _bounds(route: Route) -> tuple[list[list[int]], list[list[int]]]:
    """The bounds, by group, of the vectors that this rank requests and of those that it serves."""
    return [one.bounds for one in route], [one.served_bounds for one in route]


def _of_rank(vectors: Floats, bounds: list[int], rank: int) -> Floats:
    return vectors[bounds[rank] : bounds[rank + 1]]


class _Buffers:
    """Arrays of vectors with undefined contents, kept for reuse: fresh pages cost as much as filling them."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._free: list[npt.NDArray[np.uint8]] = []  # whole blocks

    def take(self, count: int, dim: int) -> Floats:
        """Return an array, count x dim."""
        num_bytes = count * dim * self._dtype.itemsize
        fitting = [i for i, block in enumerate(self._free) if len(block) >= num_bytes]
        if fitting:
            block = self._free.pop(min(fitting, key=lambda i: len(self._free[i])))
        else:
            block = np.empty(num_bytes + num_bytes // _SLACK, np.uint8)
        return block[:num_bytes].view(self._dtype).reshape(count, dim)

    def give_back(self, arrays: Iterable[Floats]) -> None:
        """Take back arrays that are no longer used."""
        self._free += [block for array in arrays if (block := array.base) is not None]
        if len(self._free) > _MAX_BLOCKS:
            self._free = sorted(self._free, key=len)[-_MAX_BLOCKS:]
