"""An embedding database to use on its own, behind any training loop: `EmbeddingDatabase`."""

from rowhaul.store.database.database import EmbeddingDatabase
from rowhaul.store.database.memory import MemoryReport
from rowhaul.store.database.snapshot import Snapshot
from rowhaul.store.database.tickets import Ticket, TicketError

__all__ = ["EmbeddingDatabase", "MemoryReport", "Snapshot", "Ticket", "TicketError"]
