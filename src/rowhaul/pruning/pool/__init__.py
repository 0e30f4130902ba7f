"""Pruned rows of one process: chunks in an arena, found by the map."""

from rowhaul.pruning.settings import PruneSettings

__all__ = ["PruneSettings"]
