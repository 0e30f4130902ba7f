"""Retrieval with two towers: vectors of items, an index of them, and how good it is."""

from rowhaul.retrieval.index import ItemIndex, write_index
from rowhaul.retrieval.search import exact_search, recall
from rowhaul.retrieval.vectors import item_vectors, user_vectors

__all__ = ["ItemIndex", "exact_search", "item_vectors", "recall", "user_vectors", "write_index"]
