"""`EmbeddingDatabase`: embedding rows of any key behind four calls, for any training loop.

``prefetch`` locates or creates rows in the background, ``pull`` gathers them, ``push`` takes their gradients,
``update`` applies everything pushed in one optimizer step.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rowhaul.database.base import Database, MemoryReport, check_threads
from rowhaul.database.requests import Request, check_finite, gradient_tensors, read_request
from rowhaul.database.rows import Rows
from rowhaul.database.saving import load_rows
from rowhaul.database.settings import DatabaseSettings
from rowhaul.database.snapshot import Snapshot, check_on_unknown
from rowhaul.database.tickets import Ticket, TicketError, group_requests
from rowhaul.database.vectors import Gradients, Vectors, row_gradients
from rowhaul.errors import DataError
from rowhaul.optim import RowOptimizerRule


@dataclass(frozen=True)
class TableRead:
    """Where the rows of one table's vectors are."""

    table: str
    group: int
    vectors: Vectors


LocalTicket = Ticket[list[TableRead]]


class EmbeddingDatabase(Database):
    """Tables of embedding rows that grow with the keys that are requested.

    Keys are any int64, or strings. A row is created when its key is first prefetched, with values that depend
    only on (seed, table, key). Any thread may call anything: prefetches run beside each other and beside
    pulls; a pull sees either all of an update or none of it; a deleted row is not reused while a ticket
    refers to it.

    Args:
        tables: ``{"name": dim}``, or a list of `TableSpec` or `EmbeddingBagConfig`.
        optimizer: a row optimizer's name, or one of `rowhaul.optim`'s rules.
        lr: the learning rate, only with an optimizer's name; 0.01 unless given.
        dtype: of values and optimizer state, float32 or float64.
        seed: of initial values.
        prefetch_threads: the number of prefetches that run at a time.
        num_threads: for large pulls and updates; PyTorch's number unless given. Results do not depend on it.

    Example:
        >>> with EmbeddingDatabase({"items": 16}, optimizer="rowwise_adagrad", lr=0.05) as db:
        ...     ticket = db.prefetch([7, -3, 7])
        ...     rows = db.pull(ticket).requires_grad_()
        ...     rows.sum().backward()
        ...     db.push(ticket, rows.grad)
        ...     db.update()
    """

    def __init__(
        self,
        tables: Any,
        optimizer: str | RowOptimizerRule = "rowwise_adagrad",
        *,
        lr: float | None = None,
        dtype: Any = None,
        seed: int = 0,
        prefetch_threads: int = 1,
        num_threads: int | None = None,
    ) -> None:
        super().__init__(DatabaseSettings.of(tables, optimizer, lr, dtype, seed), num_threads)
        check_threads("prefetch_threads", prefetch_threads)
        self._pool = ThreadPoolExecutor(prefetch_threads, thread_name_prefix="rowhaul-prefetch")
        self._numbers = itertools.count(1)  # of tickets
        self._lock = threading.Lock()  # of updates, and of:
        self._pushed: list[tuple[Gradients, Tensor, int]] = []  # with the tensor pushed, and its version

    def __len__(self) -> int:
        rows = self._open_rows()
        return sum(rows.num_rows(spec.name) for spec in self.settings.tables)

    def prefetch(
        self, keys: Any, table: str | None = None, *, lengths: Any = None, pooling: Any = None
    ) -> LocalTicket:
        """Locate the rows of keys, creating missing ones, in another thread.

        Args:
            keys: int64 numbers (tensor, array, list) or strings, in one dimension, with repeats; or
                ``{table: keys}``.
            table: of the keys, if the database has several and the keys are not given by table.
            lengths: the number of keys in each bag, to pool the bag's rows to one vector. By table, if keys
                are.
            pooling: ``"sum"`` or ``"mean"`` of a bag; by default what the table's `EmbeddingBagConfig` says,
                or the sum. An empty bag gives zeros.

        Raises:
            DataError: the keys are invalid; nothing has changed.
        """
        rows = self._open_rows()
        request = read_request(self.settings, keys, table, lengths, pooling)
        lease = rows.leases.begin()
        found = self._pool.submit(_locate, rows, request)
        return Ticket(rows, request, lease, found, next(self._numbers))

    def pull(self, ticket: LocalTicket, out: Any = None) -> Tensor | dict[str, Tensor]:
        """Return the ticket's vectors, one for every key or bag, in a new tensor; by table, if keys were.

        Args:
            ticket: from `prefetch`; waits until it is ready.
            out: tensors to fill instead: allocating large new ones costs as much as reading the rows.
        """
        rows = self._open_rows()
        found = self._current(rows, ticket)
        tensors = self._outputs(ticket.request, out)
        for read in found:
            rows.read(read.group, read.vectors, tensors[read.table].numpy())
        return ticket.request.result(tensors)

    def push(self, ticket: LocalTicket, gradients: Any) -> None:
        """Add the gradients of the vectors that `pull` returned to the next `update`.

        Gradients of one row are summed in the order of its keys. If every key appears once, the tensor itself
        is kept: do not change it before the update, which would refuse it. Tensors of
        ``torch.inference_mode()`` are copied.

        Raises:
            DataError: a gradient is not finite or of the wrong shape; the ticket stays good.
        """
        rows = self._open_rows()
        found = self._current(rows, ticket)
        tensors = gradient_tensors(ticket.request, gradients, self._dims, self._dtype)
        check_finite(ticket.request, (tensor.numpy() for tensor in tensors))
        pushed = []
        for read, tensor in zip(found, tensors, strict=True):
            if tensor.is_inference():  # it has no version, so that changes to it would go unnoticed
                with torch.inference_mode(False):
                    tensor = tensor.clone()
            summed = row_gradients(read.vectors, tensor.numpy())
            given = Gradients(ticket.lease, read.group, read.table, read.vectors.locations, summed)
            pushed.append((given, tensor, tensor._version))
        with self._lock:  # a load in the meantime has replaced the rows that these records belong to
            ticket.use_up(self._open_rows())
            self._pushed += pushed

    def update(self, lr: float | None = None) -> int:
        """Apply everything pushed since the last update in one optimizer step; return the rows it moved.

        It counts as a step even if nothing was pushed.

        Args:
            lr: the rate of this step; the optimizer's unless given.
        """
        rate = self._rate(lr)
        with self._lock:
            rows = self._open_rows()
            for given, tensor, version in self._pushed:
                if tensor._version != version and given.values.ctypes.data == tensor.data_ptr():
                    raise DataError(
                        f"table {given.table!r}: a gradient was changed between push and update; "
                        "push a clone, or update before the next backward(). Until discard_pushed() drops "
                        "everything pushed, every update will fail"
                    )
            moved = rows.step([given for given, _, _ in self._pushed], rate)
            self._pushed.clear()
        return moved

    def discard_pushed(self) -> None:
        """Drop everything pushed since the last update."""
        with self._lock:
            self._pushed.clear()

    def delete(self, keys: Any, table: str | None = None) -> int:
        """Delete rows; return how many existed. Tickets that refer to them become invalid."""
        rows = self._open_rows()
        request = read_request(self.settings, keys, table)
        return sum(rows.delete(asked.keys) for asked in group_requests(rows, request) if asked.parts)

    def snapshot(self, on_unknown: str = "init") -> Snapshot:
        """Take a snapshot of the rows, for reading while training continues.

        Args:
            on_unknown: what keys without a row read as: ``"init"`` (their initial values), ``"default"``
                (zeros), or ``"error"``.
        """
        check_on_unknown(on_unknown)
        with self._lock:  # a load replaces the rows
            return Snapshot(self._open_rows(), on_unknown)

    def load(self, path: str | Path) -> None:
        """Replace all rows by a checkpoint's, and drop what was pushed.

        All files are checked first and the rows replaced last: a damaged checkpoint changes nothing. Earlier
        tickets become invalid; snapshots stay as they are.
        """
        self._open_rows()
        loaded = load_rows(path, self.settings, self._pieces)
        with self._lock:
            self._open_rows()
            self._rows = loaded
            self._pushed.clear()

    def memory(self) -> MemoryReport:
        """Report bytes by purpose."""
        with self._lock:
            pushed = sum(given.values.nbytes for given, _, _ in self._pushed)
            return MemoryReport.of(self._open_rows(), pushed)

    def close(self) -> None:
        """Stop the threads and drop all rows; may be called repeatedly."""
        self._pool.shutdown()
        with self._lock:
            self._drop_rows()
            self._pushed.clear()
        self._pieces.close()

    def _current(self, rows: Rows, ticket: LocalTicket) -> list[TableRead]:
        """What a ticket found, if all of it still exists."""
        found = self._found(rows, ticket)
        for read in found:
            if rows.is_stale(ticket.lease, read.group, read.vectors.locations):
                raise TicketError.of_stale_rows(ticket.number, read.table)
        return found


def _locate(rows: Rows, request: Request) -> list[TableRead]:
    """Find or create the rows of a request, in the order of its parts."""
    reads = {}
    for asked in group_requests(rows, request):
        if asked.parts:
            locations = rows.find_or_create(asked.keys)
            for part, vectors in asked.vectors(locations):
                reads[part.table] = TableRead(part.table, asked.keys.group, vectors)
    return [reads[part.table] for part in request.parts]
