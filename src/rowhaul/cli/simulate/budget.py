"""`rowhaul simulate --memory-budget`: the same mechanisms over rows within a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rowhaul._quantities import parse_bytes
from rowhaul.budget import BudgetSettings
from rowhaul.budget.layout import slot_layout
from rowhaul.budget.scheduling import SimulatedBudget
from rowhaul.errors import ConfigError
from rowhaul.optim import row_optimizer
from rowhaul.runtime.layout import TableLayout
from rowhaul.schedule import ScheduleSettings
from rowhaul.simulate.measure import MakeScheduler
from rowhaul.store import TableSpec


def keep_within(
    schedule: ScheduleSettings, dims: Mapping[str, int], optimizer: str, budget: str, row_dtype: str
) -> tuple[ScheduleSettings, MakeScheduler]:
    """Return settings for rows within a budget, and a factory of schedulers that hand rows over.

    Args:
        schedule: of rows that are all kept.
        dims: values of a row, by table.
        optimizer: whose state travels with the rows.
        budget: bytes, such as 2GiB.
        row_dtype: what values are held in.
    """
    if not all(policy.keeps_all for policy in schedule.row_policies):
        raise ConfigError(
            "--memory-budget decides itself which ids have rows; leave out --admit-after, --ttl and "
            "--max-rows"
        )
    if schedule.hot is not None:
        raise ConfigError(
            f"--hot {len(schedule.hot)} replicates rows of the most frequent ids from the start, but with "
            "--memory-budget no id has a row of its own then; leave out one of them"
        )
    specs = tuple(TableSpec(name, dim, 0.0, 1.0) for name, dim in dims.items())
    whole = TableLayout(specs, row_optimizer(optimizer, lr=1.0), "float32", schedule.seed)
    layout = slot_layout(whole, BudgetSettings(parse_bytes(budget, "--memory-budget"), row_dtype=row_dtype))
    layout.make_maps()  # complains before the pass over the data
    return replace(schedule, sizes=layout.sizes(), policies=()), (
        lambda settings, batches: SimulatedBudget(settings, layout, batches)
    )
