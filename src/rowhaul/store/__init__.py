"""Memory for embedding rows: an index from raw keys to records, and the chunks that hold them.

`EmbeddingDatabase` is the whole of it behind four calls; it is imported when first used, as it needs PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rowhaul.store.distinct import Lookup
from rowhaul.store.tables import TableGroup, TableSpec

if TYPE_CHECKING:
    from rowhaul.database import EmbeddingDatabase

__all__ = ["EmbeddingDatabase", "Lookup", "TableGroup", "TableSpec"]


def __getattr__(name: str) -> Any:
    if name == "EmbeddingDatabase":
        from rowhaul.database import EmbeddingDatabase

        return EmbeddingDatabase
    raise AttributeError(f"module 'rowhaul.store' has no attribute {name!r}")
