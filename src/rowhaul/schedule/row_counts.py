"""How many rows the policies of tables have admitted and forgotten."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rowhaul.schedule.directory.states import State
from rowhaul.schedule.plan import Plan


@dataclass(frozen=True)
class RowCounts:
    """What policies have done, in rows: of an iteration, or added up."""

    admitted: int = 0
    gradients_dropped: int = 0  # of rows that were not admitted, one a row and iteration
    expired: int = 0  # forgotten: not named for too long
    over_limit: int = 0  # forgotten: their table had more rows than it may

    def __add__(self, other: RowCounts) -> RowCounts:
        names = (one.name for one in fields(self))
        return RowCounts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __sub__(self, other: RowCounts) -> RowCounts:
        names = (one.name for one in fields(self))
        return RowCounts(**{name: getattr(self, name) - getattr(other, name) for name in names})

    @classmethod
    def of_plan(cls, plan: Plan) -> RowCounts:
        """Those of an iteration on a cluster."""
        dropped = int((plan.states == State.NOT_ADMITTED).sum())
        return cls(plan.num_admitted, dropped, plan.num_expired, plan.num_forgotten - plan.num_expired)

    def by_name(self) -> dict[str, float]:
        """The numbers under the names that logs use."""
        return {f"rows/{one.name}": float(getattr(self, one.name)) for one in fields(self)}
