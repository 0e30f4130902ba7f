"""What the embedding database of one process and the distributed one share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rowhaul.database.requests import Request
from rowhaul.database.rows import Rows
from rowhaul.database.settings import DatabaseSettings
from rowhaul.database.threads import Pieces
from rowhaul.database.tickets import Found, Ticket
from rowhaul.errors import ConfigError, DataError


@dataclass(frozen=True)
class MemoryReport:
    """Allocated bytes by purpose."""

    num_rows: dict[str, int]  # by table
    record_bytes: int  # values and optimizer state
    used_record_bytes: int  # of them, used by rows
    resting_records: int  # deleted, but not reusable yet since tickets may know them
    index_bytes: int
    gradient_bytes: int  # pushed, waiting for an update
    snapshot_bytes: int

    @classmethod
    def of(cls, rows: Rows, gradient_bytes: int) -> MemoryReport:
        """Measure rows, beside the pushed gradients."""
        return cls(
            num_rows={spec.name: rows.num_rows(spec.name) for spec in rows.settings.tables},
            record_bytes=sum(group.arena.allocated_bytes for group in rows.groups),
            used_record_bytes=sum(int(g.index.num_keys.sum()) * g.arena.record_bytes for g in rows.groups),
            resting_records=rows.leases.num_waiting,
            index_bytes=sum(group.index.allocated_bytes for group in rows.groups),
            gradient_bytes=gradient_bytes,
            snapshot_bytes=sum(snapshot.allocated_bytes for snapshot in rows.snapshots()),
        )

    @property
    def total_bytes(self) -> int:
        """All bytes."""
        return self.record_bytes + self.index_bytes + self.gradient_bytes + self.snapshot_bytes

    def __str__(self) -> str:
        rows = sum(self.num_rows.values())
        return (
            f"{rows:,} rows: records {self.record_bytes:,} bytes ({self.used_record_bytes:,} used), index "
            f"{self.index_bytes:,}, pushed gradients {self.gradient_bytes:,}, snapshots "
            f"{self.snapshot_bytes:,}; {self.total_bytes:,} in all"
        )


class Database(ABC):
    """The rows of this process, and the checks of what users pass.

    Args:
        settings: tables, optimizer, dtype and seed.
        num_threads: for large reads and updates; PyTorch's number unless given.
    """

    def __init__(self, settings: DatabaseSettings, num_threads: int | None) -> None:
        self.settings = settings
        num_threads = torch.get_num_threads() if num_threads is None else num_threads
        check_threads("num_threads", num_threads)
        self._dims = {spec.name: spec.dim for spec in settings.tables}
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._pieces = Pieces(num_threads)
        self._rows: Rows | None = Rows(settings, self._pieces)
        self._step_at_close = 0

    @property
    def step(self) -> int:
        """Updates so far."""
        rows = self._rows
        return self._step_at_close if rows is None else rows.num_steps

    def num_rows(self, table: str) -> int:
        """Rows of a table that this process holds now."""
        return self._open_rows().num_rows(self.settings.table(table).name)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint folder: rows by key with checksums, readable by any number of ranks.

        It saves a snapshot, so other threads may continue training. Gradients that were pushed but not yet
        applied are not part of it. Ranks save together, to a folder that all of them see.
        """
        with self.snapshot() as snapshot:
            snapshot.save(path)

    @abstractmethod
    def snapshot(self, on_unknown: str = "init") -> Any:
        """Take a snapshot of the rows."""

    @abstractmethod
    def close(self) -> None:
        """Stop the threads and drop all rows; may be called repeatedly."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        tables = ", ".join(f"{name}: {dim}" for name, dim in self._dims.items())
        return f"{type(self).__name__}({{{tables}}}, {self.settings.optimizer})"

    def _drop_rows(self) -> None:
        self._step_at_close = self.step
        self._rows = None

    def _open_rows(self) -> Rows:
        rows = self._rows
        if rows is None:
            raise ConfigError("the database is closed; create another one, and load() what was saved")
        return rows

    def _found(self, rows: Rows, ticket: Ticket[Found]) -> Found:
        if not isinstance(ticket, Ticket):
            raise ConfigError(f"a ticket from prefetch() is needed, got {type(ticket).__name__}")
        return ticket.found(rows)

    def _rate(self, lr: float | None) -> float:
        """The learning rate of a step: the one given, or the optimizer's."""
        lr = self.settings.optimizer.lr if lr is None else lr
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not np.isfinite(lr) or lr < 0:
            raise ConfigError(f"lr must be a number of at least 0, got {lr!r}")
        return float(lr)

    def _outputs(self, request: Request, out: Any) -> dict[str, Tensor]:
        """The tensors to fill with a request's vectors, by table: those given, or new ones."""
        if not (out is None or request.is_single or isinstance(out, Mapping)):
            raise DataError(
                f"the ticket's keys were given by table, so out must be too: {{table: tensor}}, got "
                f"{type(out).__name__}"
            )
        tensors = {}
        for part in request.parts:
            shape = (part.num_vectors, self._dims[part.table])
            if out is None:
                tensors[part.table] = torch.empty(shape, dtype=self._dtype)
                continue
            given = out if request.is_single else out.get(part.table)
            self._check_output(part.table, given, shape)
            tensors[part.table] = given
        return tensors

    def _check_output(self, table: str, given: Any, shape: tuple[int, int]) -> None:
        is_tensor = isinstance(given, Tensor)
        if not is_tensor or tuple(given.shape) != shape or given.dtype != self._dtype:
            found = f"{given.dtype} of shape {tuple(given.shape)}" if is_tensor else repr(given)
            raise DataError(f"table {table!r}: out must be {self._dtype} of shape {shape}, got {found}")
        if not given.is_contiguous() or given.device.type != "cpu" or given.requires_grad:
            raise DataError(f"table {table!r}: out must be a contiguous CPU tensor that requires no gradient")


def check_threads(name: str, count: int) -> None:
    """Refuse impossible numbers of threads."""
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {count!r}")
