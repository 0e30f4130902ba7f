"""Memory for embedding rows: an index from raw keys to records, and the chunks that hold them."""

from rowhaul.store.distinct import Lookup
from rowhaul.store.tables import TableGroup, TableSpec

__all__ = ["Lookup", "TableGroup", "TableSpec"]
