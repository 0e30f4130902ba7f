"""The embedding database over several processes: `DistributedEmbeddingDatabase`, and it as a layer."""

from rowhaul.exchange.database.bags import DatabaseBags
from rowhaul.exchange.database.database import DistributedEmbeddingDatabase
from rowhaul.exchange.database.dense import DenseGradients
from rowhaul.exchange.database.snapshot import DistributedSnapshot

__all__ = ["DatabaseBags", "DenseGradients", "DistributedEmbeddingDatabase", "DistributedSnapshot"]
