"""What a user decides about a budget of bytes: how many, how they are divided, how often it is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rowhaul.errors import ConfigError
from rowhaul.store.packing import PLAIN, check_row_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rowhaul.nn.features import FeatureGroup
    from rowhaul.nn.row_source import RowSource
    from rowhaul.optim import RowOptimizerRule
    from rowhaul.runtime.layout import TableLayout

MOST_SHARED = 0.9  # of a budget
PERIOD = 200  # steps between two stops, later on
_GROWTH = 5  # early on, the next stop comes after a fifth of the steps so far: most ids are new then
_WHERE = "prune"  # names settings in messages, as the configuration file has them


@dataclass(frozen=True)
class BudgetSettings:
    """Rows of a collection within ``bytes``: values, optimizer state and all that finds or chooses them.

    Args:
        bytes: for all tables together.
        shared: the share of them for rows that ids without a row of their own read and train.
        decay: of counts of accesses, by step; above 0 and at most 1.
        period: steps between two stops, at which rows change hands.
        row_dtype: what values are held in, see `rowhaul.nn.RowPrecision`.
    """

    bytes: int
    shared: float = 0.04
    decay: float = 0.999
    period: int = PERIOD
    row_dtype: str = PLAIN

    def __post_init__(self) -> None:
        _check(self.bytes >= 1, "budget", "bytes, such as 2GiB", self.bytes)
        _check(
            0 < self.shared <= MOST_SHARED,
            "shared",
            f"a share above 0 and at most {MOST_SHARED}",
            self.shared,
        )
        _check(0 < self.decay <= 1, "decay", "above 0 and at most 1", self.decay)
        _check(self.period >= 1, "period", "at least 1", self.period)
        check_row_dtype(self.row_dtype)

    @property
    def row_format(self) -> str:
        """The format of the rows, see `rowhaul.store.row_format`."""
        return "slots" if self.row_dtype == PLAIN else f"slots-{self.row_dtype}"

    def make_rows(
        self, groups: Sequence[FeatureGroup], optimizer: RowOptimizerRule, seed: int, on_unknown: str
    ) -> RowSource:
        """Make the rows of a collection in this process; see `rowhaul.nn.row_source.RowSettings`.

        ``on_unknown`` applies to nothing: ids without a row of their own read a shared one. So no id is an
        error.
        """
        if on_unknown == "error":
            raise ConfigError(
                "on_unknown='error' does not go with a memory budget: ids never trained cannot be told from "
                "those without a row of their own, and read the same shared rows; use 'tail'"
            )
        from rowhaul.budget.rows import BudgetedRows  # settings alone need no torch

        return BudgetedRows(groups, optimizer, seed, self)

    def layout(self, whole: TableLayout) -> TableLayout:
        """Turn the layout of whole rows into that of rows within this budget, for a cluster."""
        from rowhaul.budget.layout import slot_layout

        return slot_layout(whole, self)

    def next_stop(self, iteration: int) -> int:
        """Return the first stop after ``iteration`` steps; a cluster reads ahead no further."""
        regular = _GROWTH * self.period  # from here on stops are a period apart
        if iteration >= regular:
            first = self._first_regular()
            return first + ((iteration - first) // self.period + 1) * self.period
        stop = 0
        while stop <= iteration:
            stop += self._gap(stop)
        return stop

    def last_stop(self, iteration: int) -> int:
        """Return the last stop before ``iteration``; 0 before the first."""
        before = 0
        if iteration > _GROWTH * self.period:
            before = max(0, iteration - 2 * self.period)
        while (stop := self.next_stop(before)) < iteration:
            before = stop
        return before if before == 0 or self.is_stop(before) else self.last_stop(before)

    def is_stop(self, iteration: int) -> bool:
        """Whether rows change hands after this many steps."""
        return iteration > 0 and self.next_stop(iteration - 1) == iteration

    def _gap(self, stop: int) -> int:
        return min(max(1, stop // _GROWTH), self.period)

    def _first_regular(self) -> int:
        stop = 0
        while stop < _GROWTH * self.period:
            stop += self._gap(stop)
        return stop


def _check(holds: bool, name: str, needed: str, given: Any) -> None:
    if not holds:
        raise ConfigError(f"{_WHERE}.{name} must be {needed}, got {given!r}")
