"""The scheduler of a cluster whose rows may be pruned: sizes, caches and homes of chunks instead of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rowhaul._quantities import parse_bytes
from rowhaul.errors import ConfigError
from rowhaul.pruning.chunk_map import ChunkMap
from rowhaul.pruning.config import check_cluster
from rowhaul.pruning.layout import ChunkLayout, check_schedule
from rowhaul.pruning.scheduling import ChunkScheduler
from rowhaul.runtime.row_memory import TableLayout
from rowhaul.schedule import HotRows, IdBatch, RowPolicy, Scheduler, ScheduleSettings, Topology
from rowhaul.train.cluster_config import ClusterConfig


def schedule_settings(
    config: ClusterConfig,
    topology: Topology,
    layout: TableLayout,
    *,
    seed: int = 0,
    hot: HotRows | None = None,
    speeds: Sequence[float] | None = None,
    policies: tuple[RowPolicy, ...] = (),
) -> ScheduleSettings:
    """The settings of the scheduler for tables, in chunks or not; see `ClusterConfig.schedule`.

    A cache of so many rows holds as many times their chunks.
    """
    if not isinstance(layout, ChunkLayout):
        sizes = layout.sizes()
        return config.schedule(topology, sizes, seed=seed, hot=hot, speeds=speeds, policies=policies)
    check_cluster(config)
    if not all(policy.keeps_all for policy in policies):
        raise ConfigError(
            "prune decides by itself which rows are forgotten, but tables have policies by which rows come "
            "and go; leave out one of them"
        )
    in_bytes = str(config.cache).strip()[-1:].isalpha()
    if not in_bytes:
        config = replace(config, cache=str(int(config.cache) * layout.num_chunks))
    chunked = replace(topology, tables_per_row=layout.num_chunks)
    settings = config.schedule(chunked, layout.sizes(), seed=seed, speeds=speeds)
    if in_bytes and layout.columns_to_keep:  # chunks of one size now will be smaller: more of them fit
        capacity = parse_bytes(str(config.cache), "cluster.cache")
        settings = replace(settings, cache=replace(settings.cache, capacity=capacity, unit="bytes"))
    return settings


def make_scheduler(settings: ScheduleSettings, layout: TableLayout, ids: Iterable[IdBatch]) -> Scheduler:
    """A new scheduler for tables, in chunks or not; ids are those of rows."""
    if not isinstance(layout, ChunkLayout):
        return Scheduler(settings, ids)
    check_schedule(settings, layout)
    return ChunkScheduler(settings, ChunkMap(layout), ids)
