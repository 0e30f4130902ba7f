"""Memory for embedding rows: an index from raw keys to records, and the chunks that hold them."""

from rowhaul.store.tables import Lookup, TableGroup, TableSpec

__all__ = ["Lookup", "TableGroup", "TableSpec"]
