"""The embedding database: rows of any key behind prefetch, pull, push and update, in one process or several.

Everything here is imported on first use, since it needs PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rowhaul.database.bags import DatabaseBags
    from rowhaul.database.base import MemoryReport
    from rowhaul.database.database import EmbeddingDatabase
    from rowhaul.database.distributed.database import DistributedEmbeddingDatabase
    from rowhaul.database.distributed.snapshot import DistributedSnapshot
    from rowhaul.database.snapshot import Snapshot
    from rowhaul.database.tickets import Ticket, TicketError
    from rowhaul.transport.dense_sum import DenseSum

_MODULES = {
    "DatabaseBags": "rowhaul.database.bags",
    "DenseSum": "rowhaul.transport.dense_sum",
    "DistributedEmbeddingDatabase": "rowhaul.database.distributed.database",
    "DistributedSnapshot": "rowhaul.database.distributed.snapshot",
    "EmbeddingDatabase": "rowhaul.database.database",
    "MemoryReport": "rowhaul.database.base",
    "Snapshot": "rowhaul.database.snapshot",
    "Ticket": "rowhaul.database.tickets",
    "TicketError": "rowhaul.database.tickets",
}

__all__ = [
    "DatabaseBags",
    "DenseSum",
    "DistributedEmbeddingDatabase",
    "DistributedSnapshot",
    "EmbeddingDatabase",
    "MemoryReport",
    "Snapshot",
    "Ticket",
    "TicketError",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rowhaul.database' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
