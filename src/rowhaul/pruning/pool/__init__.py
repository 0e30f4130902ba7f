"""Pruning in training: rows in pieces, a pool that is never exceeded, and what decides who stays in it."""

from rowhaul.pruning.pool.lookups import PrunedLookup
from rowhaul.pruning.pool.pool import ChunkPool
from rowhaul.pruning.pool.pruner import Pruner
from rowhaul.pruning.pool.tables import PrunedTables
from rowhaul.pruning.settings import PruneSettings

__all__ = ["ChunkPool", "PruneSettings", "PrunedLookup", "PrunedTables", "Pruner"]
