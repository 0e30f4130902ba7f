"""`DistributedEmbeddingDatabase`: the embedding database over several processes, each with some of the rows.

It has the calls of `EmbeddingDatabase`. All ranks make the same calls in the same order; each passes its own
keys and gradients, and an update applies those of all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rowhaul.database.base import Database, MemoryReport
from rowhaul.database.distributed import locations
from rowhaul.database.distributed.calls import Calls, RefusedError, check_equal, form_links
from rowhaul.database.distributed.dividing import owners_of
from rowhaul.database.distributed.routes import ARRAYS_PER_GROUP, Route, find_route
from rowhaul.database.distributed.snapshot import DistributedSnapshot
from rowhaul.database.distributed.traffic import Tables, Traffic, fill_columns, fill_tables, sum_gradients
from rowhaul.database.requests import Request, as_gradient, check_finite, gradient_tensors, read_request
from rowhaul.database.rows import Rows
from rowhaul.database.saving import load_rows
from rowhaul.database.settings import DatabaseSettings
from rowhaul.database.snapshot import Snapshot, check_on_unknown
from rowhaul.database.tickets import Ticket
from rowhaul.database.vectors import Floats
from rowhaul.errors import ClusterError, ConfigError, DataError
from rowhaul.optim import RowOptimizerRule
from rowhaul.transport.base import Links

Result = TypeVar("Result")
DistributedTicket = Ticket[Route]


class DistributedEmbeddingDatabase(Database):
    """Tables of embedding rows that the ranks of a process group hold together.

    A hash of the key selects the rank that owns its index entry, which names the rank that stores the row:
    the same one until `migrate` moves it. Prefetches run in their own thread and process group, beside pulls
    and pushes. Pushed gradients are summed at the rank that stores the row, in the order of pushes, and of
    ranks within a push: the same bits in every run, and those of one process up to rounding.

    Every call except `num_rows` and `memory` is collective. There are three sequences of calls, and all ranks
    must keep one order in each: (1) prefetch, delete, migrate, snapshot, load and total_rows; (2) pull, push,
    update and discard_pushed; (3) reading and saving snapshots. Snapshots and loads must also be between the
    same calls of (2) on all ranks. A rank that makes another call is an error on all ranks; one that makes
    none is an error after ``timeout_seconds``.

    Args:
        tables: as for `EmbeddingDatabase`; the same on all ranks, as are optimizer, lr, dtype and seed.
        optimizer: a row optimizer's name, or one of `rowhaul.optim`'s rules.
        group: the ranks, of ``torch.distributed``; all unless given. Three Gloo groups of them are created.
        lr: the learning rate, only with an optimizer's name.
        dtype: float32 or float64.
        seed: of initial values.
        num_threads: for large reads and updates.
        timeout_seconds: the time that a rank waits for another.
        links: three sets of links between the ranks, instead of a group.

    Example:
        >>> dist.init_process_group("gloo")
        >>> with DistributedEmbeddingDatabase({"items": 16}, lr=0.05) as db:
        ...     ticket = db.prefetch(keys_of_this_rank)
        ...     rows = db.pull(ticket)
    """

    def __init__(
        self,
        tables: Any,
        optimizer: str | RowOptimizerRule = "rowwise_adagrad",
        *,
        group: dist.ProcessGroup | None = None,
        lr: float | None = None,
        dtype: Any = None,
        seed: int = 0,
        num_threads: int | None = None,
        timeout_seconds: float = 300,
        links: Sequence[Links] | None = None,
    ) -> None:
        super().__init__(DatabaseSettings.of(tables, optimizer, lr, dtype, seed), num_threads)
        rows = self._open_rows()
        self._close_links: Callable[[], None] = lambda: None
        if links is None:
            links, self._close_links = form_links(group, timeout_seconds)
        try:
            check_equal(links[0], self.settings)
        except BaseException:
            self._close_links()
            raise
        num_details = ARRAYS_PER_GROUP * len(rows.groups)
        self._index_calls, row_calls, self._read_calls = (Calls(one, num_details) for one in links)
        self.rank, self.num_ranks = links[0].rank, links[0].num_ranks
        self._moved = locations.Moved(rows)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rowhaul-index")
        self._lock = threading.Lock()  # keeps tickets and index calls in one order
        self._num_tickets = 0
        self._traffic = Traffic(row_calls, self.settings.dtype)

    def total_rows(self) -> dict[str, int]:
        """Rows of every table on all ranks together."""
        return self._in_order(self._count)

    def prefetch(
        self, keys: Any, table: str | None = None, *, lengths: Any = None, pooling: Any = None
    ) -> DistributedTicket:
        """Locate the rows of this rank's keys, creating missing ones, in another thread.

        All ranks prefetch together, with arguments as for `EmbeddingDatabase.prefetch`; a rank may pass no
        keys (``[]`` or ``{}``).
        """
        rows = self._open_rows()
        request = read_request(self.settings, keys, table, lengths, pooling)
        with self._lock:
            self._num_tickets += 1
            number = self._num_tickets
            lease = rows.leases.begin()
            future = self._pool.submit(self._find, rows, request, number)
        return Ticket(rows, request, lease, future, number)

    def pull(self, ticket: DistributedTicket, out: Any = None) -> Tensor | dict[str, Tensor]:
        """Return the ticket's vectors, as `EmbeddingDatabase.pull`."""
        rows, route = self._route(ticket)
        tensors = self._outputs(ticket.request, out)
        outputs = {name: tensor.numpy() for name, tensor in tensors.items()}

        def fill(group: int, arrived: Floats) -> None:
            fill_tables(rows, group, route[group], arrived, outputs)

        self._traffic.pull(rows, ticket, route, fill)
        return ticket.request.result(tensors)

    def pull_joined(self, ticket: DistributedTicket) -> Tensor:
        """Return the vectors of the ticket's tables side by side, in their order: samples x sum of dims.

        All tables must have the same number of vectors.
        """
        rows, route = self._route(ticket)
        columns, shape = self._columns(ticket.request)
        tensor = torch.empty(shape, dtype=self._dtype)

        def fill(group: int, arrived: Floats) -> None:
            fill_columns(rows, group, route[group], arrived, columns, tensor.numpy())

        self._traffic.pull(rows, ticket, route, fill)
        return tensor

    def push(self, ticket: DistributedTicket, gradients: Any) -> None:
        """Send the gradients of the ticket's vectors to the ranks that store the rows, for the next update.

        The tensors passed are not kept; their gradients travel while the caller continues.

        Raises:
            DataError: on all ranks, where a gradient of any is not finite; the ticket stays good.
        """
        self._route(ticket)  # before the gradients are checked
        tensors = gradient_tensors(ticket.request, gradients, self._dims, self._dtype)
        parts = zip(ticket.request.parts, tensors, strict=True)
        self._push(ticket, {part.table: tensor.numpy() for part, tensor in parts})

    def push_joined(self, ticket: DistributedTicket, gradients: Tensor) -> None:
        """`push` the gradients of what `pull_joined` returned."""
        self._route(ticket)
        columns, shape = self._columns(ticket.request)
        given = as_gradient(gradients, shape, self._dtype, "all tables").numpy()
        self._push(ticket, {name: given[:, at : at + self._dims[name]] for name, at in columns.items()})

    def update(self, lr: float | None = None) -> int:
        """Apply everything that any rank pushed in one optimizer step; return the rows moved on this rank."""
        return self._traffic.update(self._open_rows(), self._rate(lr))

    def discard_pushed(self) -> None:
        """Drop everything that any rank pushed since the last update."""
        self._open_rows()
        self._traffic.discard_pushed()

    def delete(self, keys: Any, table: str | None = None) -> int:
        """Delete the rows of the keys that any rank passes; return how many existed on all ranks."""
        rows = self._open_rows()
        request = read_request(self.settings, keys, table)
        return self._in_order(lambda: locations.delete(self._index_calls, rows, self._moved, request))

    def migrate(self, keys: Any, rank: int, table: str | None = None) -> int:
        """Store the rows of the keys that any rank passes on one rank; return how many moved.

        Values and optimizer state stay the same. Tickets that refer to the rows become invalid, and pushed
        gradients must have been applied by an update.
        """
        rows = self._open_rows()
        if not isinstance(rank, int) or not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rows can be moved to ranks 0 to {self.num_ranks - 1}; got {rank!r}")
        if self._traffic.is_waiting:
            raise ConfigError("pushed gradients wait for an update; call update() before migrate()")
        request = read_request(self.settings, keys, table)
        calls = self._index_calls
        return self._in_order(lambda: locations.migrate(calls, rows, self._moved, request, rank))

    def snapshot(self, on_unknown: str = "init") -> DistributedSnapshot:
        """Take a snapshot of the rows of all ranks, for reading while training continues.

        All ranks must be between the same updates: call it in the thread that updates, or let that thread
        wait. Otherwise it is an error on all ranks, and may be tried again.
        """
        check_on_unknown(on_unknown)
        self._open_rows()
        return self._in_order(lambda: self._take_snapshot(on_unknown))

    def load(self, path: str | Path) -> None:
        """Replace all rows by a checkpoint's, written by any number of ranks.

        Every rank reads all of it and keeps the rows whose keys it owns. If it is damaged for any rank,
        nothing changes on any. What was pushed is dropped.
        """
        self._open_rows()
        self._in_order(lambda: self._load(path))

    def memory(self) -> MemoryReport:
        """Report bytes by purpose, of this rank."""
        return MemoryReport.of(self._open_rows(), self._traffic.pushed_bytes)

    def close(self) -> None:
        """Stop the threads, close the process groups and drop all rows; may be called repeatedly."""
        self._pool.shutdown()
        if self._rows is not None:
            self._drop_rows()
            self._traffic.forget_pushed()
            self._pieces.close()
            self._close_links()

    def _route(self, ticket: DistributedTicket) -> tuple[Rows, Route]:
        rows = self._open_rows()
        return rows, self._found(rows, ticket)

    def _push(self, ticket: DistributedTicket, gradients: Tables) -> None:
        rows, route = self._route(ticket)
        self._traffic.push(
            rows,
            ticket,
            route,
            lambda group, sums: sum_gradients(route[group], gradients, sums),
            lambda: check_finite(ticket.request, (gradients[part.table] for part in ticket.request.parts)),
        )

    def _columns(self, request: Request) -> tuple[dict[str, int], tuple[int, int]]:
        """The first column of each table side by side with the others, and the shape of the whole."""
        columns, width = {}, 0
        for part in request.parts:
            columns[part.table] = width
            width += self._dims[part.table]
        counts = sorted({part.num_vectors for part in request.parts})
        if len(counts) > 1:
            raise DataError(
                "tables can be joined only if all have the same number of vectors; the ticket's have "
                f"{', '.join(map(str, counts))}: pass lengths=, or pull() them by table"
            )
        return columns, (counts[0] if counts else 0, width)

    def _in_order(self, work: Callable[[], Result]) -> Result:
        """Run an index call after those before it."""

        def call() -> Result:
            with self._index_calls.call():
                return work()

        with self._lock:
            called = self._pool.submit(call)
        return called.result()

    def _find(self, rows: Rows, request: Request, number: int) -> Route:
        locate = partial(locations.find_or_create, rows, self._moved, self.rank)
        with self._index_calls.call():
            return find_route(self._index_calls, rows, request, locate, "prefetch", number)

    def _count(self) -> dict[str, int]:
        names = [spec.name for spec in self.settings.tables]
        own = np.array([self._open_rows().num_rows(name) for name in names])
        heard = self._index_calls.swap("total_rows", 0, [[own]] * self.num_ranks)
        totals: list[int] = np.sum([counts for (counts,) in heard], axis=0).tolist()
        return dict(zip(names, totals, strict=True))

    def _take_snapshot(self, on_unknown: str) -> DistributedSnapshot:
        rows = self._open_rows()
        local = Snapshot(rows, on_unknown)
        own = np.full((self.num_ranks, 1), local.step)
        steps = self._index_calls.compare("snapshot", 0, own)[:, 0].tolist()
        if len(set(steps)) > 1:
            local.close()
            found = ", ".join(f"{step} on rank {rank}" for rank, step in enumerate(steps))
            raise RefusedError(
                ClusterError(
                    f"ranks took a snapshot after different numbers of updates: {found}; take it where all "
                    "ranks are between the same updates"
                )
            )
        return DistributedSnapshot(self._read_calls, rows, local, self._moved.copy(), on_unknown)

    def _load(self, path: str | Path) -> None:
        read = partial(
            load_rows,
            path,
            self.settings,
            self._pieces,
            lambda keys: owners_of(keys, self.num_ranks) == self.rank,
        )
        rows, _ = self._index_calls.attempt("load", 0, read)
        self._traffic.drop_pushed()
        self._rows, self._moved = rows, locations.Moved(rows)
