"""Pruning while training: which parts of which rows are kept, in memory, on disk and on the wire."""

from rowhaul.pruning.settings import PruneSettings

__all__ = ["PruneSettings"]
