"""The error of ranks that do not agree."""

from __future__ import annotations

from collections.abc import Sequence

from rowhaul.errors import ClusterError


class DisagreementError(ClusterError):
    """Ranks are about to do different things where they must do the same, or already have."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks in a message."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
