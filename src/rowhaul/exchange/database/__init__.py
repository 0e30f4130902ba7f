"""The embedding database over several processes: `DistributedEmbeddingDatabase`."""

from rowhaul.exchange.database.database import DistributedEmbeddingDatabase
from rowhaul.exchange.database.snapshot import DistributedSnapshot

__all__ = ["DistributedEmbeddingDatabase", "DistributedSnapshot"]
