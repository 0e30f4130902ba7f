"""The settings of pruning as people write them: shares in percent, memory in GiB."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rowhaul.errors import ConfigError
from rowhaul.simulate.quantities import parse_bytes
from rowhaul.store.pruning import PruneSettings
from rowhaul.train.cluster_config import ClusterConfig


@dataclass(frozen=True)
class PruneConfig:
    """Which part of the rows is kept in memory; by default all of it. See docs/pruning.md.

    Args:
        ratio: the share of all values that is pruned, such as 90% or 0.9.
        budget: memory for rows, optimizer state and index, such as 2GiB, instead of a ratio.
        chunks: pieces of a row that are kept or pruned by themselves.
        period: steps between prunings.
        decay: of utilities, by step.
        sample: utilities that are looked at to find the threshold.
        enforcement: pieces below the threshold go when more than this share is on its wrong side.
        utility: gradient (accesses times the norm of gradients), or access.
        ratios: adaptive (one threshold for all pieces), linear or power (by their place in the row).
        dims: values that are kept of every row, chosen for each table after cold_start steps; 0: all.
        cold_start: steps before they are chosen.
    """

    ratio: str = "0"
    budget: str = "0"
    chunks: int = 4
    period: int = 1000
    decay: float = 0.98
    sample: int = 100_000
    enforcement: float = 0.05
    utility: str = "gradient"
    ratios: str = "adaptive"
    dims: int = 0
    cold_start: int = 1000

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


def check_cluster(config: ClusterConfig) -> None:
    """Refuse what pruning does not go together with."""
    refused = {
        "hot_rows": bool(config.hot_rows),
        "sync": config.sync.partition(":")[0] in ("bounded", "static"),
        "shares": config.shares == "auto",
        "data_from": config.data_from == "rank0",
    }
    instead = {
        "hot_rows": "0",
        "sync": "on-demand or full",
        "shares": "equal, or weights such as 2,1,1",
        "data_from": "every_host",
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ConfigError(
                f"cluster.{name} is {getattr(config, name)}, which does not go together with prune; set it "
                f"to {instead[name]}, or leave out prune"
            )


UNPRUNED = PruneConfig()
