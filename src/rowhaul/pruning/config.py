"""The settings of pruning as people write them: shares in percent, memory in GiB."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from rowhaul._quantities import parse_bytes
from rowhaul.errors import ConfigError
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.settings import PruneRules


@dataclass(frozen=True)
class PruneConfig(PruneRules):
    """Which part of the rows is kept in memory; by default all of it. See docs/pruning.md.

    How they are pruned is `PruneRules`.

    Args:
        ratio: the share of all values that is pruned, such as 90% or 0.9.
        budget: memory for rows, optimizer state and index, such as 2GiB, instead of a ratio.
        two_dimensions: whether columns are pruned, too, where a ratio is given; they are by default, since
            otherwise the rows that are read and sent most stay whole.
    """

    ratio: str = "0"
    budget: str = "0"
    two_dimensions: bool = True

    def __post_init__(self) -> None:
        self._settings()

    def settings(self) -> PruneSettings | None:
        """As the store takes them; None where nothing is pruned."""
        settings = self._settings()
        return settings if settings.ratio or settings.budget or settings.dims else None

    def _settings(self) -> PruneSettings:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        given |= {"ratio": parse_share(self.ratio), "budget": parse_bytes(str(self.budget), "prune.budget")}
        return PruneSettings(**given)


def parse_share(text: str) -> float:
    """A share of 1, from ``90%`` or ``0.9``."""
    number, percent, rest = str(text).strip().partition("%")
    try:
        if rest:
            raise ValueError
        return float(number) / 100 if percent else float(number)
    except ValueError:
        raise ConfigError(f"prune.ratio must be a share such as 90% or 0.9, got {text!r}") from None


def check_cluster(sync: str, hot_rows: Any) -> None:
    """Refuse a cluster's settings that pruning does not go together with."""
    mode, what, given = sync.partition(":")[0], "sync", sync
    instead = "on-demand or full"
    if hot_rows:
        why = "every worker holds hot rows whole, and nothing of them could go"
        what, given, instead = "hot_rows", hot_rows, "0"
    elif mode == "static":
        why = "its hot rows are held whole by every worker"
    elif mode == "bounded":
        why = "workers may know different versions of a row, and would differ about what it is worth"
    else:
        return
    raise ConfigError(
        f"cluster.{what} is {given}, which does not go together with prune: {why}; set it to {instead}, or "
        "leave out prune"
    )


UNPRUNED = PruneConfig()
