"""`EmbeddingDatabase`: embedding rows of any key behind four calls, for any training loop.

``prefetch`` locates or allocates rows in a thread of its own, ``pull`` gathers them, ``push`` takes their
gradients, ``update`` is one optimizer step of everything pushed.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowhaul.database.memory import MemoryReport, report
from rowhaul.database.pieces import Pieces
from rowhaul.database.pooled import row_gradients
from rowhaul.database.requests import gradient_tensors, read_request
from rowhaul.database.rows import Rows
from rowhaul.database.settings import DatabaseSettings
from rowhaul.database.snapshot import Snapshot, check_on_unknown
from rowhaul.database.stepping import Gradients
from rowhaul.database.tickets import TableRead, Ticket, locate, stale_error
from rowhaul.errors import ConfigError, DataError
from rowhaul.optim import RowOptimizerRule

LocalTicket = Ticket[list[TableRead]]


class EmbeddingDatabase:
    """Tables of embedding rows that grow with the keys they are asked for.

    Keys are any int64, or strings. A row is made when its key is first prefetched, with values that depend
    on (seed, table, key) alone. All calls may come from several threads: prefetches run beside each other
    and beside pulls; a pull sees the whole of an update or nothing of it; a row deleted while a ticket knows
    it is not reused before the ticket is gone.

    Args:
        tables: ``{"name": dim}``, or a list of `TableSpec` or `EmbeddingBagConfig`.
        optimizer: a row optimizer's name, or one of `rowhaul.optim`'s rules.
        lr: its rate, with a name only; 0.01 unless given.
        dtype: of values and optimizer state, float32 or float64.
        seed: of first values.
        prefetch_threads: how many prefetches are worked on at a time.
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
        self.settings = DatabaseSettings.of(tables, optimizer, lr, dtype, seed)
        check_threads("prefetch_threads", prefetch_threads)
        num_threads = torch.get_num_threads() if num_threads is None else num_threads
        check_threads("num_threads", num_threads)
        self._pieces = Pieces(num_threads)
        self._rows: Rows | None = Rows(self.settings, self._pieces)
        self._pool = ThreadPoolExecutor(prefetch_threads, thread_name_prefix="rowhaul-prefetch")
        self._lock = threading.Lock()  # of what follows
        self._pushed: list[
            tuple[Gradients, Tensor, int]
        ] = []  # with the tensor it came from, and its version
        self._step = 0
        self._numbers = itertools.count(1)  # of tickets; not under the lock, which an update holds

    @property
    def step(self) -> int:
        """Updates so far."""
        return self._step

    def __len__(self) -> int:
        rows = self._open_rows()
        return sum(rows.num_rows(spec.name) for spec in self.settings.tables)

    def num_rows(self, table: str) -> int:
        """Rows that a table holds now."""
        return self._open_rows().num_rows(self.settings.table(table).name)

    def prefetch(
        self, keys: Any, table: str | None = None, *, lengths: Any = None, pooling: Any = None
    ) -> LocalTicket:
        """Locate the rows of keys, and make those that are not there, in another thread.

        Args:
            keys: int64 numbers (tensor, array, list) or strings, in one dimension, repeated as you like; or
                ``{table: keys}``.
            table: of the keys, where the database has several and the keys are not given by table.
            lengths: how many keys each bag has, for features of several keys: the bag's rows are pooled to
                one vector. By table, where keys are.
            pooling: ``"sum"`` (default) or ``"mean"`` of a bag; an empty one gives zeros.

        Raises:
            DataError: the keys are not what they should be; nothing has changed.
        """
        rows = self._open_rows()
        request = read_request(self.settings, keys, table, lengths, pooling)
        lease = rows.leases.begin()
        found = self._pool.submit(locate, rows, request)
        return Ticket(rows, request, lease, found, next(self._numbers))

    def pull(self, ticket: LocalTicket, out: Any = None) -> Tensor | dict[str, Tensor]:
        """The ticket's vectors, one for every key or bag, in a new tensor; by table, if keys were.

        Args:
            ticket: from `prefetch`; waits until it is ready.
            out: tensors to fill instead, as they would be returned: large new ones cost as much as the rows.
        """
        rows = self._open_rows()
        vectors: dict[str, Tensor] = {}
        for read in self._current(rows, ticket):
            shape = (read.vectors.num_vectors, rows.groups[read.group].dim)
            tensor = output(out, ticket.request.is_single, read.table, shape, self._torch_dtype)
            rows.read(read.group, read.vectors, tensor.numpy())
            vectors[read.table] = tensor
        return ticket.request.result(vectors)

    def push(self, ticket: LocalTicket, gradients: Any) -> None:
        """Hand in the gradients of the vectors that `pull` gave, for the next `update`.

        Gradients of one row are summed in the order of its keys. The tensor itself is kept where every key
        is there once: it must not be changed before the update, which notices and refuses.
        """
        rows = self._open_rows()
        found = self._current(rows, ticket)
        tensors = gradient_tensors(ticket.request, gradients, self._dims, self._torch_dtype)
        pushed = []
        for read, tensor in zip(found, tensors, strict=True):
            summed = row_gradients(read.vectors, tensor.numpy())
            given = Gradients(ticket.lease, read.group, read.table, read.vectors.locations, summed)
            pushed.append((given, tensor, tensor._version))
        ticket.use_up(rows)
        with self._lock:
            self._pushed += pushed

    def update(self, lr: float | None = None) -> int:
        """One optimizer step of everything pushed since the last one; returns the number of rows it moved.

        It counts as a step even if nothing was pushed.

        Args:
            lr: the rate of this step; the optimizer's own unless given.
        """
        rows = self._open_rows()
        rate = check_rate(self.settings.optimizer.lr if lr is None else lr)
        with self._lock:
            for given, tensor, version in self._pushed:
                if tensor._version != version and given.gradients.ctypes.data == tensor.data_ptr():
                    raise DataError(
                        f"table {given.table!r}: a gradient was changed between push and update; "
                        "push a clone, or update before the next backward()"
                    )
            moved = rows.step([given for given, _, _ in self._pushed], rate, self._step + 1)
            self._pushed.clear()
            self._step += 1
        return moved

    def discard_pushed(self) -> None:
        """Forget everything pushed since the last update."""
        with self._lock:
            self._pushed.clear()

    def delete(self, keys: Any, table: str | None = None) -> int:
        """Forget rows; returns how many there were. Tickets that know them cannot be used any more."""
        rows = self._open_rows()
        request = read_request(self.settings, keys, table)
        return sum(rows.delete(part.table, part.keys) for part in request.parts)

    def snapshot(self, on_unknown: str = "init") -> Snapshot:
        """The rows as they are now, for reading while training goes on.

        Args:
            on_unknown: what keys without a row read as: ``"init"`` (what they would start with),
                ``"default"`` (zeros), or ``"error"``.
        """
        check_on_unknown(on_unknown)
        rows = self._open_rows()
        with self._lock:  # not in the middle of an update
            return Snapshot(rows, rows.view(), on_unknown, self._step)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint folder: rows by key with checksums, readable by any number of ranks.

        It is a snapshot's: training may go on in other threads meanwhile. What was pushed and not updated
        is not part of it.
        """
        with self.snapshot() as snapshot:
            snapshot.save(path)

    def load(self, path: str | Path) -> None:
        """Replace all rows by a checkpoint's, and forget what was pushed.

        All files are checked first, and rows are exchanged when the last one was read: a damaged checkpoint
        changes nothing. Tickets from before cannot be used any more; snapshots stay as they are.
        """
        from rowhaul.database.saving import load_rows, open_checkpoint, step_of

        self._open_rows()
        reader = open_checkpoint(path, self.settings)
        loaded = Rows(self.settings, self._pieces)
        loaded.reserve({name: table.num_rows for name, table in reader.tables.items()})
        load_rows(reader, loaded.load)
        with self._lock:
            self._open_rows()
            self._rows, self._step = loaded, step_of(reader)
            self._pushed.clear()

    def memory(self) -> MemoryReport:
        """Bytes by purpose."""
        with self._lock:
            return report(self._open_rows(), [given for given, _, _ in self._pushed])

    def close(self) -> None:
        """End the threads and forget all rows; any number of times."""
        self._pool.shutdown()
        with self._lock:
            self._rows = None
            self._pushed.clear()
        self._pieces.close()

    def __enter__(self) -> EmbeddingDatabase:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        tables = ", ".join(f"{spec.name}: {spec.dim}" for spec in self.settings.tables)
        return f"EmbeddingDatabase({{{tables}}}, {self.settings.optimizer})"

    @property
    def _dims(self) -> dict[str, int]:
        return {spec.name: spec.dim for spec in self.settings.tables}

    @property
    def _torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.settings.dtype)
        return dtype

    def _open_rows(self) -> Rows:
        rows = self._rows
        if rows is None:
            raise ConfigError("the database is closed; make another one, and load() what was saved")
        return rows

    def _current(self, rows: Rows, ticket: LocalTicket) -> list[TableRead]:
        """What a ticket found, while all of it is still there."""
        if not isinstance(ticket, Ticket):
            raise ConfigError(f"a ticket from prefetch() is needed, got {type(ticket).__name__}")
        found = ticket.found(rows)
        for read in found:
            if rows.is_stale(ticket.lease, read.group, read.vectors.locations):
                raise stale_error(ticket.number, read.table)
        return found


def check_threads(name: str, count: int) -> None:
    """Refuse numbers of threads that cannot be."""
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name} must be a whole number from 1, got {count!r}")


def check_rate(lr: float) -> float:
    """A learning rate that a step can be taken with."""
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not np.isfinite(lr) or lr < 0:
        raise ConfigError(f"lr must be a number of at least 0, got {lr!r}")
    return float(lr)


def output(out: Any, is_single: bool, table: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The tensor that a table's vectors go to: the given one if it fits, or a new one."""
    if out is None:
        return torch.empty(shape, dtype=dtype)
    given = out if is_single else out.get(table)
    if not isinstance(given, Tensor) or tuple(given.shape) != shape or given.dtype != dtype:
        found = f"{given.dtype} of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
        raise DataError(f"table {table!r}: out must be {dtype} of shape {shape}, got {found}")
    if not given.is_contiguous() or given.device.type != "cpu" or given.requires_grad:
        raise DataError(f"table {table!r}: out must be a contiguous CPU tensor that requires no gradient")
    return given
