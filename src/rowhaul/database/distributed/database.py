"""`DistributedEmbeddingDatabase`: the embedding database over several processes, each with some of the rows.

The twin of `rowhaul.store.EmbeddingDatabase`, with its calls. All ranks make the same calls in the same
order; each gives its own keys and gradients, and an update applies those of all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rowhaul.database.database import check_rate, check_threads, output
from rowhaul.database.distributed import structure
from rowhaul.database.distributed.calls import Calls
from rowhaul.database.distributed.forming import check_equal, form_links
from rowhaul.database.distributed.routes import NUM_DETAILS, Route, find_route
from rowhaul.database.distributed.snapshot import DistributedSnapshot
from rowhaul.database.distributed.traffic import Traffic
from rowhaul.database.distributed.vectors import fill_joined, fill_tables, joined_columns, sum_gradients
from rowhaul.database.memory import MemoryReport, report
from rowhaul.database.pieces import Pieces
from rowhaul.database.requests import Request, as_gradient, gradient_tensors, read_request
from rowhaul.database.rows import Rows
from rowhaul.database.settings import DatabaseSettings
from rowhaul.database.snapshot import Snapshot, check_on_unknown
from rowhaul.database.tickets import Ticket
from rowhaul.errors import ConfigError
from rowhaul.optim import RowOptimizerRule
from rowhaul.transport.base import Links

Result = TypeVar("Result")
DistributedTicket = Ticket[Route]


class DistributedEmbeddingDatabase:
    """Tables of embedding rows that the ranks of a process group hold together.

    The index entry of a key is at the rank that a hash of the key says, and tells which rank stores the row:
    at first the same one, until `migrate` moves it. Prefetches run in a thread and a process group of their
    own, beside pulls and pushes. Pushed gradients are summed at the rank that stores the row, in the order of
    pushes, and of ranks within a push: the same bits in every run, and those of one process up to rounding.

    Every call but `prefetch`'s waiting, `num_rows` and `memory` is collective. There are three sequences of
    calls, in each of which all ranks must have the same order: (1) prefetch, delete, migrate, snapshot, load
    and total_rows; (2) pull, push, update; (3) reading and saving snapshots. A rank that calls something else
    is an error on all ranks; one that does not call is an error after ``timeout_seconds``.

    Args:
        tables: as `EmbeddingDatabase` takes them; the same on all ranks, as optimizer, lr, dtype and seed.
        optimizer: a row optimizer's name, or one of `rowhaul.optim`'s rules.
        group: the ranks, of ``torch.distributed``; all, unless given. Three Gloo groups of them are made.
        lr: the optimizer's rate, with a name only.
        dtype: float32 or float64.
        seed: of first values.
        num_threads: for large gathers and updates.
        timeout_seconds: how long a rank waits for another.
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
        self.settings = DatabaseSettings.of(tables, optimizer, lr, dtype, seed)
        self._dims = {spec.name: spec.dim for spec in self.settings.tables}
        num_threads = torch.get_num_threads() if num_threads is None else num_threads
        check_threads("num_threads", num_threads)
        self._links, self._destroy = (
            form_links(group, timeout_seconds) if links is None else (links, _nothing)
        )
        try:
            check_equal(self._links[0], self.settings)
        except BaseException:
            self._destroy()
            raise
        num_details = max(4, NUM_DETAILS * len(self.settings.tables))
        self._index_calls, row_calls, self._read_calls = (Calls(one, num_details) for one in self._links)
        self.rank, self.num_ranks = self._links[0].rank, self._links[0].num_ranks
        self._pieces = Pieces(num_threads)
        self._rows: Rows | None = Rows(self.settings, self._pieces)
        self._moved = structure.Moved(self._rows)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rowhaul-index")
        self._lock = threading.Lock()  # keeps the order of index calls, and their numbers
        self._num_tickets = 0
        self._step = 0
        self._traffic = Traffic(row_calls, self.settings.dtype)

    @property
    def step(self) -> int:
        """Updates so far."""
        return self._step

    def num_rows(self, table: str) -> int:
        """Rows of a table that this rank stores."""
        return self._open_rows().num_rows(self.settings.table(table).name)

    def total_rows(self) -> dict[str, int]:
        """Rows of every table on all ranks together."""
        return self._in_order(self._count).result()

    def prefetch(
        self, keys: Any, table: str | None = None, *, lengths: Any = None, pooling: Any = None
    ) -> DistributedTicket:
        """Locate the rows of this rank's keys, and make those that are not there, in another thread.

        All ranks prefetch together; arguments as `EmbeddingDatabase.prefetch` takes them, no keys at all
        (``[]`` or ``{}``) included.
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
        """The ticket's vectors, as `EmbeddingDatabase.pull`."""
        rows = self._open_rows()
        route = self._found(rows, ticket)
        tensors = {
            part.table: output(
                out,
                ticket.request.is_single,
                part.table,
                (part.num_vectors, self._dims[part.table]),
                self._torch_dtype,
            )
            for part in ticket.request.parts
        }
        outputs = {name: tensor.numpy() for name, tensor in tensors.items()}

        def fill(group: int, arrived: Any) -> None:
            fill_tables(rows, group, route[group], arrived, outputs)

        self._traffic.pull(rows, ticket, route, fill)
        return ticket.request.result(tensors)

    def pull_joined(self, ticket: DistributedTicket) -> Tensor:
        """The ticket's vectors side by side in the order of its tables: samples x sum of dims.

        All tables must have been asked for as many vectors.
        """
        rows = self._open_rows()
        route = self._found(rows, ticket)
        columns, shape = joined_columns(self._dims, ticket.request)
        tensor = torch.empty(shape, dtype=self._torch_dtype)

        def fill(group: int, arrived: Any) -> None:
            fill_joined(rows, group, route[group], arrived, columns, tensor.numpy())

        self._traffic.pull(rows, ticket, route, fill)
        return tensor

    def push_joined(self, ticket: DistributedTicket, gradients: Tensor) -> None:
        """`push` of the gradients of what `pull_joined` gave."""
        rows = self._open_rows()
        route = self._found(rows, ticket)
        columns, shape = joined_columns(self._dims, ticket.request)
        given = as_gradient(gradients, shape, self._torch_dtype, "all tables").numpy()
        by_table = {name: given[:, first : first + self._dims[name]] for name, first in columns.items()}
        self._traffic.push(
            rows, ticket, route, lambda group, sums: sum_gradients(route[group], by_table, sums)
        )

    def push(self, ticket: DistributedTicket, gradients: Any) -> None:
        """Send the gradients of the ticket's vectors to the ranks that store the rows, for the next update.

        Nothing is kept of the tensors given; the gradients travel while the caller goes on.
        """
        rows = self._open_rows()
        route = self._found(rows, ticket)
        tensors = gradient_tensors(ticket.request, gradients, self._dims, self._torch_dtype)
        by_table = {
            part.table: tensor.numpy() for part, tensor in zip(ticket.request.parts, tensors, strict=True)
        }
        self._traffic.push(
            rows, ticket, route, lambda group, sums: sum_gradients(route[group], by_table, sums)
        )

    def update(self, lr: float | None = None) -> int:
        """One optimizer step of everything that any rank pushed; the number of rows moved on this rank."""
        rows = self._open_rows()
        rate = check_rate(self.settings.optimizer.lr if lr is None else lr)
        moved = self._traffic.update(rows, rate, self._step + 1)
        self._step += 1
        return moved

    def delete(self, keys: Any, table: str | None = None) -> int:
        """Forget the rows of the keys that any rank gives; how many there were, on all ranks together."""
        rows = self._open_rows()
        request = read_request(self.settings, keys, table)
        return self._in_order(
            lambda: structure.delete(self._index_calls, rows, self._moved, request, 0)
        ).result()

    def migrate(self, keys: Any, rank: int, table: str | None = None) -> int:
        """Store the rows of the keys that any rank gives on one rank; how many moved. Their values stay.

        Tickets that know the rows cannot be used any more, and nothing pushed may be waiting for an update.
        """
        rows = self._open_rows()
        if not isinstance(rank, int) or not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rows can be moved to ranks 0 to {self.num_ranks - 1}; got {rank!r}")
        if self._traffic.is_waiting:
            raise ConfigError("gradients were pushed and wait for an update; call update() before migrate()")
        request = read_request(self.settings, keys, table)
        return self._in_order(
            lambda: structure.migrate(self._index_calls, rows, self._moved, request, rank)
        ).result()

    def snapshot(self, on_unknown: str = "init") -> DistributedSnapshot:
        """The rows of all ranks as they are now, for reading while training goes on."""
        check_on_unknown(on_unknown)
        rows = self._open_rows()
        return self._in_order(lambda: self._snapshot(rows, on_unknown)).result()

    def save(self, path: str | Path) -> None:
        """Write one checkpoint together, to a folder that all ranks see; see `EmbeddingDatabase.save`."""
        with self.snapshot() as snapshot:
            snapshot.save(path)

    def load(self, path: str | Path) -> None:
        """Replace all rows by a checkpoint's, whatever the number of ranks that wrote it.

        Every rank reads all of it and keeps the rows whose keys it owns. If any rank finds it damaged,
        nothing changes on any.
        """
        self._open_rows()
        self._in_order(lambda: self._load(path)).result()

    def memory(self) -> MemoryReport:
        """Bytes by purpose, of this rank."""
        return report(self._open_rows(), [])

    def close(self) -> None:
        """End the threads and the process groups, and forget all rows; any number of times."""
        self._pool.shutdown()
        if self._rows is not None:
            self._rows = None
            self._traffic.forget()
            self._pieces.close()
            self._destroy()

    def __enter__(self) -> DistributedEmbeddingDatabase:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.settings.dtype)
        return dtype

    def _open_rows(self) -> Rows:
        rows = self._rows
        if rows is None:
            raise ConfigError("the database is closed; make another one, and load() what was saved")
        return rows

    def _found(self, rows: Rows, ticket: DistributedTicket) -> Route:
        if not isinstance(ticket, Ticket):
            raise ConfigError(f"a ticket from prefetch() is needed, got {type(ticket).__name__}")
        return ticket.found(rows)

    def _in_order(self, work: Callable[[], Result]) -> Future[Result]:
        """Run an index call after those that came before it."""

        def call() -> Result:
            with self._index_calls.call():
                return work()

        with self._lock:
            return self._pool.submit(call)

    def _find(self, rows: Rows, request: Request, number: int) -> Route:
        locate = partial(structure.find_or_make, rows, self._moved, self.rank)
        with self._index_calls.call():
            return find_route(self._index_calls, rows, request, locate, number)

    def _count(self) -> dict[str, int]:
        names = [spec.name for spec in self.settings.tables]
        own = np.array([[self._open_rows().num_rows(name) for name in names]])
        heard = self._index_calls.tell("total_rows", 0, np.repeat(own, self.num_ranks, axis=0))
        return dict(zip(names, heard[:, : len(names)].sum(axis=0).tolist(), strict=True))

    def _snapshot(self, rows: Rows, on_unknown: str) -> DistributedSnapshot:
        self._index_calls.tell("snapshot", self._step)
        local = Snapshot(rows, rows.view(), on_unknown, self._step)
        return DistributedSnapshot(self._read_calls, rows, local, self._moved.copy(), on_unknown)

    def _load(self, path: str | Path) -> None:
        from rowhaul.database.distributed.saving import load_owned

        rows, step = load_owned(self._index_calls, self.settings, self._pieces, path)
        self._rows, self._moved, self._step = rows, structure.Moved(rows), step
        self._traffic.forget()


def _nothing() -> None:
    pass
