"""Pruning in training: rows in pieces, a pool that is never exceeded, and what decides who stays in it."""

from rowhaul.store.pruning.lookups import PrunedLookup
from rowhaul.store.pruning.pool import ChunkPool
from rowhaul.store.pruning.pruner import Pruner
from rowhaul.store.pruning.settings import PruneSettings
from rowhaul.store.pruning.tables import PrunedTables

__all__ = ["ChunkPool", "PruneSettings", "PrunedLookup", "PrunedTables", "Pruner"]
