"""An embedding database to use on its own, behind any training loop: `EmbeddingDatabase`."""

from rowhaul.database.database import EmbeddingDatabase
from rowhaul.database.memory import MemoryReport
from rowhaul.database.snapshot import Snapshot
from rowhaul.database.tickets import Ticket, TicketError

__all__ = ["EmbeddingDatabase", "MemoryReport", "Snapshot", "Ticket", "TicketError"]
