"""The settings of pruning and of budgets as people write them: shares in percent, memory in GiB."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from rowhaul._field_types import check_fields
from rowhaul._quantities import parse_bytes
from rowhaul.budget import BudgetSettings
from rowhaul.errors import ConfigError
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.settings import PruneRules
from rowhaul.store.packing import PLAIN

TAILS = ("auto", "shared", "zeros", "initial")
# What follows the length of a run where it is open: it comes at least so many times, or after such a part.
_FITTED = {"period": 20, "cold_start": 10}
# Rules for chunks, which a shared tail has none of; `period` and `decay` are for both.
CHUNK_RULES = tuple(one.name for one in fields(PruneRules) if one.name not in ("period", "decay"))


@dataclass(frozen=True)
class PruneConfig(PruneRules):
    """Which part of the rows is kept in memory; by default all of it.

    See docs/memory-budget.md, and docs/pruning.md. How chunks of rows are pruned is `PruneRules`.

    Args:
        ratio: the share of all values that is pruned, such as 90% or 0.9.
        budget: memory for rows, optimizer state and index, such as 2GiB, instead of a ratio.
        tail: what ids read that have no row of their own. ``shared``: a row that they share and train, within
            a budget. ``zeros``: chunks of rows are pruned and read as zeros. ``initial``: the values that
            their row would begin with, untrained; that is what tables with ``admit_after`` do. ``auto``:
            shared where a budget is given and no rule for chunks, otherwise zeros, and initial where
            nothing is pruned.
        shared: the share of the budget for such rows.
        period: steps between two prunings, or two stops at which rows change hands; 0: what suits the tail,
            and the length of the run where that is known.
        cold_start: as of `PruneRules`; 0: 1,000 steps, fewer in a short run.
        narrowed_from: the embedding_dim before it was made smaller to suit the budget; 0: it was not.
        two_dimensions: whether columns are pruned, too, where a ratio is given; they are by default, since
            otherwise the rows that are read and sent most stay whole.
    """

    ratio: str = "0"
    budget: str = "0"
    two_dimensions: bool = True
    tail: str = "auto"
    shared: float = BudgetSettings.shared
    period: int = 0
    cold_start: int = 0
    narrowed_from: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tail not in TAILS:
            raise ConfigError(f"prune.tail must be one of {', '.join(TAILS)}, got {self.tail!r}")
        if self.is_shared:
            self._check_shared()
        elif self.tail == "initial":
            self._check_initial()
        else:
            self._check_zeros()

    @property
    def is_shared(self) -> bool:
        """Whether ids without a row of their own share some."""
        has_budget = parse_bytes(str(self.budget), "prune.budget") > 0
        return self.tail == "shared" or (self.tail == "auto" and has_budget and not self._chunk_rules())

    @property
    def is_used(self) -> bool:
        """Whether anything is pruned, or has a budget."""
        return self.is_shared or self._pruning() is not None

    def settings(self, row_dtype: str = PLAIN) -> PruneSettings | BudgetSettings | None:
        """As the store takes them; None where nothing is pruned. ``row_dtype`` is of rows in a budget."""
        if not self.is_shared:
            return self._pruning()
        if parse_share(self.ratio):
            raise ConfigError(
                f"prune.ratio {self.ratio} with a shared tail is a share of what all rows would take, so ids "
                "have to be counted first: `rowhaul train` does it in one process and where it starts the "
                "ranks itself, `rowhaul.train.fitting.fitted` anywhere; or give a prune.budget"
            )
        return self._budget(parse_bytes(str(self.budget), "prune.budget"), row_dtype)

    def _budget(self, num_bytes: int, row_dtype: str = PLAIN) -> BudgetSettings:
        given: dict[str, Any] = {"decay": self.decay} if self.decay else {}
        if self.period:
            given["period"] = self.period
        return BudgetSettings(num_bytes, self.shared, row_dtype=row_dtype, **given)

    def _pruning(self) -> PruneSettings | None:
        given = {one.name: getattr(self, one.name) for one in fields(PruneRules)}
        for name in _FITTED:
            given[name] = given[name] or getattr(PruneRules, name)
        ratio, budget = parse_share(self.ratio), parse_bytes(str(self.budget), "prune.budget")
        settings = PruneSettings(**given, ratio=ratio, budget=budget)
        return settings if settings.ratio or settings.budget or settings.dims else None

    def _chunk_rules(self) -> list[str]:
        """Name the rules for chunks that are not as they are by default."""
        rules = [one for one in fields(self) if one.name in CHUNK_RULES]
        given = [one.name for one in rules if getattr(self, one.name) != one.default]
        # Earlier versions wrote it into every configuration.
        return [name for name in given if name != "cold_start" or self.cold_start != PruneRules.cold_start]

    def paced(self, num_steps: int) -> PruneConfig:
        """Return the same with what chunks leave open, period and cold start, for a run of so many steps."""
        fitted = {
            name: getattr(self, name) or max(1, min(getattr(PruneRules, name), num_steps // times))
            for name, times in _FITTED.items()
        }
        return replace(self, **fitted)

    def unused(self, num_steps: int, dim: int) -> list[str]:
        """Say what is asked for and never comes in a run of so many steps, with rows of ``dim`` values."""
        settings = None if self.is_shared else self._pruning()
        if settings is None:
            return []
        end, said = f"but the run ends after {num_steps:,}", []
        if settings.period > num_steps:
            said.append(
                f"prune.period is {settings.period:,} steps, {end}: rows are pruned early on where the first "
                "fill all the room, and never again; set a shorter period"
            )
        if settings.num_columns(dim) and settings.cold_start > num_steps:
            said.append(
                f"prune.cold_start is {settings.cold_start:,} steps, {end}: all columns stay; set fewer steps"
            )
        return said

    def _check_shared(self) -> None:
        if rules := self._chunk_rules():
            raise ConfigError(
                f"prune.{rules[0]} is a rule for chunks of rows, which prune.tail shared has none of; leave "
                "it out, or set prune.tail to zeros"
            )
        ratio, budget = parse_share(self.ratio), parse_bytes(str(self.budget), "prune.budget")
        PruneSettings(ratio=ratio, budget=budget)  # or raises: both, or no share
        if not ratio and not budget:
            raise ConfigError(
                "prune.tail is shared, but nothing says how much memory there is: give a budget (2GiB), "
                "or else a ratio, the share of the memory to save (90%)"
            )
        self._budget(budget or 1)  # or raises

    def _check_initial(self) -> None:
        if self._pruning() is not None:
            raise ConfigError(
                "prune.tail is initial, the tail of tables that admit ids by a policy (tables.default."
                "admit_after): within a budget ids without a row read shared rows, and what a ratio or dims "
                "prune reads as zeros; set prune.tail to shared or zeros, or leave out prune"
            )
        self._check_zeros()

    def _check_zeros(self) -> None:
        self._pruning()  # or raises
        if self.shared != BudgetSettings.shared:
            raise ConfigError(
                f"prune.shared is {self.shared:g}, but what is pruned reads as zeros here: it applies to a "
                "budget with prune.tail shared, without rules for chunks; leave it out"
            )


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
    elif mode == "at-home":
        why = "it reads rows whole, and chunks come and go by a plan"
    elif mode == "bounded":
        why = "workers may know different versions of a row, and would differ about what it is worth"
    else:
        return
    raise ConfigError(
        f"cluster.{what} is {given}, which does not go together with prune: {why}; set it to {instead}, or "
        "leave out prune"
    )


UNPRUNED = PruneConfig()
