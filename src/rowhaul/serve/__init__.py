"""Scores from an exported folder: `Scorer` in this process, and the same over HTTP (`rowhaul serve`)."""

from rowhaul.serve.scorer import Scorer

__all__ = ["Scorer"]
