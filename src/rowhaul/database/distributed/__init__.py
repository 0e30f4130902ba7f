"""The embedding database over several processes: `DistributedEmbeddingDatabase`, and it as a layer."""

from rowhaul.database.distributed.bags import DatabaseBags
from rowhaul.database.distributed.database import DistributedEmbeddingDatabase
from rowhaul.database.distributed.dense import DenseGradients
from rowhaul.database.distributed.snapshot import DistributedSnapshot

__all__ = ["DatabaseBags", "DenseGradients", "DistributedEmbeddingDatabase", "DistributedSnapshot"]
