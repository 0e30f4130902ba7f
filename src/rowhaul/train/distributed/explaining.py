"""What `rowhaul.explain` has to know of a run on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rowhaul.cluster.cluster import Cluster
from rowhaul.errors import ConfigError
from rowhaul.explain.account import RunFacts
from rowhaul.explain.explainer import Explainer
from rowhaul.pruning.config import PruneConfig
from rowhaul.store.packing import PLAIN
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed.training import DistributedTraining
from rowhaul.train.trainer import Trainer
from rowhaul.transport.dense.overlapping import EXACT_WIRE


def explainer_of(
    cluster: Cluster, training: DistributedTraining, trainer: Trainer, folder: Path | None
) -> Explainer:
    """Make the explainer of a rank; rank 0's tells and writes."""
    leads, every = cluster.rank == 0, trainer.config.log_every
    facts = _explained_facts(cluster, training, trainer) if leads else None
    return Explainer(training.runtime, every, facts, folder if leads else None)


def _explained_facts(cluster: Cluster, training: DistributedTraining, trainer: Trainer) -> RunFacts:
    """Describe ranks, tables and caches."""
    settings = training.settings
    workers = settings.topology.num_workers
    configs = trainer.collection.table_configs()
    parts = len(training.layout.specs) // len(configs)  # a pruned table is several to plans
    return RunFacts(
        roles=cluster.roles,
        hosts=[one.host_name for one in cluster.members],
        num_workers=workers,
        tables=[one.name for one in configs],
        table_of=[table for table in range(len(configs)) for _ in range(parts)],
        value_bytes=settings.sizes.values,
        state_bytes=settings.sizes.state,
        cache_capacity=int(settings.cache.capacities(workers).sum()),
        cache_unit=settings.cache.unit,
        first_step=trainer.step,
        exact_dense_sum=trainer.config.cluster.dense_wire == EXACT_WIRE,
        hot_rows=0 if settings.hot is None else len(settings.hot),
        refused=_refused(trainer.config),
    )


def _refused(config: TrainConfig) -> list[str]:
    """Return options that may help a run, but not beside its other settings."""
    refused = [] if config.held_in == PLAIN else ["--row-dtype"]
    changes: dict[str, Callable[[], TrainConfig]] = {
        "--hot": lambda: replace(config, cluster=replace(config.cluster, hot_rows=1)),
        "--prune": lambda: replace(config, prune=PruneConfig(ratio="0.5")),
        "--row-dtype": lambda: replace(config, row_dtype="bfloat16"),
    }
    for option, change in changes.items():
        try:
            change()
        except ConfigError:
            refused.append(option)
    if config.prune.is_used:
        refused.append("--prune")
    return refused
