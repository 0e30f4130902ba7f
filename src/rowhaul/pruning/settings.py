"""What a user decides about pruning: how much goes, how it is measured, how often it is looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rowhaul.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rowhaul.nn.features import FeatureGroup
    from rowhaul.nn.row_source import RowSource
    from rowhaul.optim import RowOptimizerRule
    from rowhaul.runtime.layout import TableLayout

UTILITIES = ("access", "gradient")
# Accesses are remembered for longer than the default period; norms fall while training converges.
DECAYS = {"access": 0.999, "gradient": 0.98}
RATIOS = ("adaptive", "linear", "power")

# While training begins, the rows that come first take all the room, whatever they are worth. So in the first
# period rows are pruned this many times early, if some are turned away and twice as many are known as before.
EARLY = 10

# However much is pruned in two dimensions, this share of the columns stays: what is left of a row must be
# worth the entry that finds it.
LEAST_COLUMNS = 0.25

# Names of the settings in messages, as the configuration file has them.
_WHERE = "prune"


@dataclass(frozen=True)
class PruneRules:
    """How rows are pruned while they are trained (FIITED; one chunk a row is AdaEmbed), but not how much.

    A row is ``chunks`` pieces, each with a utility; every ``period`` steps the pieces of highest utility get
    the memory there is. This is the one place that names these settings: other forms of them (a configuration
    file, which has shares in percent) inherit them.

    Args:
        chunks: pieces of a row that are kept or pruned by themselves, at most its number of values.
        period: steps between two prunings.
        decay: of utilities, by step; above 0 and at most 1. 0: what suits the utility, see `DECAYS`.
        sample: utilities that are looked at to find the threshold.
        enforcement: pieces below the threshold go when more than this share of all is on its wrong side.
        utility: ``access`` counts accesses: a function of the ids alone, so one process and any cluster keep
            the same pieces. ``gradient`` sums accesses times the norm of a piece's gradient.
        ratios: ``linear`` or ``power``: by a piece's place in its row, later pieces more often pruned.
            ``adaptive``: one threshold for all pieces, by which counts of accesses keep rows whole.
        dims: values kept of every row, chosen for each table after ``cold_start`` steps; 0: all.
        cold_start: steps after which they are chosen.
        two_dimensions: prune columns, too, where a ratio says how much and ``dims`` nothing. Of them the
            square root of what is to be kept stays, pieces do the rest, and the ratio is that of all values.
    """

    chunks: int = 4
    period: int = 1000
    decay: float = 0.0
    sample: int = 100_000
    enforcement: float = 0.05
    utility: str = "access"
    ratios: str = "linear"
    dims: int = 0
    cold_start: int = 1000
    two_dimensions: bool = False

    def __post_init__(self) -> None:
        for name in ("chunks", "period", "sample", "cold_start"):
            _check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _check(0 <= self.decay <= 1, "decay", "above 0 and at most 1, or 0 for the default", self.decay)
        _check(0 <= self.enforcement <= 1, "enforcement", "a share from 0 to 1", self.enforcement)
        _check(self.utility in UTILITIES, "utility", f"one of {', '.join(UTILITIES)}", self.utility)
        _check(self.ratios in RATIOS, "ratios", f"one of {', '.join(RATIOS)}", self.ratios)
        if self.dims and self.dims < self.chunks:
            raise ConfigError(
                f"{_WHERE}.dims keeps {self.dims} values of a row, fewer than its {self.chunks} chunks; "
                f"keep more, or set {_WHERE}.chunks to at most {self.dims}"
            )

    @property
    def by_access(self) -> bool:
        """Whether utilities are counts of accesses."""
        return self.utility == "access"

    @property
    def decay_of_step(self) -> float:
        """The decay of utilities by step."""
        return self.decay or DECAYS[self.utility]

    def next_stop(self, iteration: int) -> int:
        """Return the next iteration before which rows may be pruned; a cluster reads ahead no further."""
        following = (iteration // self.period + 1) * self.period
        if iteration >= self.period:
            return following
        step = max(1, self.period // EARLY)
        return min((iteration // step + 1) * step, following)

    def is_stop(self, iteration: int) -> bool:
        """Whether rows may be pruned before this iteration."""
        return self.next_stop(iteration - 1) == iteration


@dataclass(frozen=True)
class PruneSettings(PruneRules):
    """How rows are pruned (`PruneRules`), and how much.

    Args:
        ratio: the share of all pieces that is pruned, at least 0 and below 1.
        budget: bytes for rows, optimizer state and index together, instead of a ratio; 0: none.
    """

    row_format: ClassVar[str] = "chunked"

    ratio: float = 0.0
    budget: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(
            0 <= self.ratio < 1, "ratio", "a share of at least 0 and below 1, such as 0.9 or 90%", self.ratio
        )
        _check(self.budget >= 0, "budget", "bytes, such as 2GiB", self.budget)
        if self.ratio and self.budget:
            raise ConfigError(
                f"{_WHERE}: a ratio ({self.ratio:g}) and a budget ({self.budget:,} bytes) cannot both be "
                "kept; give one of them"
            )

    @property
    def counts_columns(self) -> bool:
        """Whether the ratio is that of all values, and columns that go leave room for more pieces."""
        return self.two_dimensions and self.ratio > 0 and not self.dims

    def num_columns(self, dim: int) -> int:
        """Values that rows of ``dim`` keep after the cold start; 0: all of them, from the beginning on."""
        if not self.counts_columns:
            return self.dims
        share = max(LEAST_COLUMNS, math.sqrt(1 - self.ratio))
        kept = max(math.ceil(share * dim - 1e-6), self.chunks)  # half of 32 columns are 16, however rounded
        return kept if kept < dim else 0

    def make_rows(
        self, groups: Sequence[FeatureGroup], optimizer: RowOptimizerRule, seed: int, on_unknown: str
    ) -> RowSource:
        """Make the rows of a collection in this process; see `rowhaul.nn.row_source.RowSettings`."""
        if on_unknown == "error":
            raise ConfigError(
                "on_unknown='error' does not go with pruning: pruned rows cannot be told from unknown ones, "
                "and read as zeros; use 'tail'"
            )
        from rowhaul.pruning.pool.collection import PrunedRows  # settings alone need no torch

        return PrunedRows(groups, optimizer, seed, self)

    def layout(self, whole: TableLayout) -> TableLayout:
        """Turn the layout of whole rows into that of chunks, for a cluster."""
        from rowhaul.pruning.layout import chunk_layout

        return chunk_layout(whole, self)

    def check_dim(self, table: str, dim: int) -> None:
        """Refuse rows that cannot be cut as these settings say."""
        if self.chunks > dim:
            raise ConfigError(
                f"{_WHERE}.chunks is {self.chunks}, but rows of table {table!r} have {dim} values; a chunk "
                f"needs one at least: set {_WHERE}.chunks to at most {dim}"
            )
        if self.dims > dim:
            raise ConfigError(
                f"{_WHERE}.dims keeps {self.dims} values of a row, but rows of table {table!r} have {dim}; "
                f"keep fewer, or 0 for all"
            )


def _check(holds: bool, name: str, needed: str, given: Any) -> None:
    if not holds:
        raise ConfigError(f"{_WHERE}.{name} must be {needed}, got {given!r}")
