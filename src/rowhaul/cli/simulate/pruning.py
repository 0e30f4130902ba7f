"""`rowhaul simulate --prune`: the same mechanisms over pruned rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rowhaul.errors import ConfigError
from rowhaul.optim import row_optimizer
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.config import PruneConfig, parse_share
from rowhaul.pruning.layout import chunk_layout
from rowhaul.pruning.scheduling import SimulatedPruning
from rowhaul.runtime.layout import TableLayout
from rowhaul.schedule import ScheduleSettings
from rowhaul.simulate.measure import MakeScheduler
from rowhaul.store import TableSpec


def pruned(ratio: str, chunks: int, period: int | None, iterations: int) -> PruneConfig:
    """How training would prune over so many iterations: in two dimensions, when that is not said.

    Args:
        ratio: share of all values to prune.
        chunks: of a row.
        period: iterations between prunings; None: what suits their number, as the cold start does.
        iterations: of the whole simulation.
    """
    return PruneConfig(ratio=ratio, chunks=chunks, period=period or 0).paced(iterations)


def prune(
    schedule: ScheduleSettings, dims: Mapping[str, int], optimizer: str, config: PruneConfig
) -> tuple[ScheduleSettings, MakeScheduler]:
    """Turn settings of rows into settings of chunks; returns them and a factory of schedulers that prune.

    Args:
        schedule: of whole rows.
        dims: values of a row, by table.
        optimizer: whose state travels with the rows.
        config: as `pruned` makes it.
    """
    if not all(policy.keeps_all for policy in schedule.row_policies):
        raise ConfigError(
            "--prune decides itself which rows to forget; leave out --admit-after, --ttl and --max-rows"
        )
    settings = PruneSettings(
        ratio=parse_share(config.ratio),
        chunks=config.chunks,
        period=config.period,
        cold_start=config.cold_start,
        utility="access",
        two_dimensions=config.two_dimensions,
    )
    specs = tuple(TableSpec(name, dim, 0.0, 1.0) for name, dim in dims.items())
    layout = chunk_layout(
        TableLayout(specs, row_optimizer(optimizer, lr=1.0), "float32", schedule.seed), settings
    )
    cache = schedule.cache
    if cache.unit == "rows":
        assert isinstance(cache.capacity, int)
        cache = replace(cache, capacity=cache.capacity * config.chunks)
    chunked = replace(
        schedule,
        topology=replace(schedule.topology, tables_per_row=config.chunks),
        sizes=layout.sizes(),
        cache=cache,
        policies=(),
    )
    return chunked, lambda settings, batches: SimulatedPruning(settings, layout, batches)
