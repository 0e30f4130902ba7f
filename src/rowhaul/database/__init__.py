"""The embedding database: rows of any key behind prefetch, pull, push and update."""

from rowhaul.database.bags import DatabaseBags
from rowhaul.database.base import MemoryReport
from rowhaul.database.database import EmbeddingDatabase
from rowhaul.database.distributed.database import DistributedEmbeddingDatabase
from rowhaul.database.distributed.snapshot import DistributedSnapshot
from rowhaul.database.snapshot import Snapshot
from rowhaul.database.tickets import Ticket, TicketError
from rowhaul.transport.dense.dense_sum import DenseSum

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
