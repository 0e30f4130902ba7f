"""The methods by name: each makes the collection that a model reads rows through; the rest is the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from pruning_methods.affording import limit_entries, mixed_dims, pruned_ratio
from pruning_methods.growing import GrowingCollection
from pruning_methods.hashing import HashedRows, hashed_rows
from pruning_methods.logs import Log, Source
from pruning_methods.mixed import MixedDimensions, popularity_dims
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, RowOptimizer
from rowhaul.nn.models import build_model
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.pool.collection import PrunedRows
from rowhaul.train import TrainConfig
from rowhaul.train.trainer import Trainer

DENSE_RATE = 0.002
PERIOD = 20  # steps between prunings: logs here are some hundred steps, not days
CHUNKS = 4

UNPRUNED, ADAEMBED, FIITED, LINEAR = "unpruned", "AdaEmbed (K = 1)", "FIITED", "FIITED, linear ratios"
TWO_DIMENSIONS, MIXED, GROWING = "FIITED 2-D", "mixed dimensions", "growing (as ESAPN)"
METHODS = (UNPRUNED, ADAEMBED, FIITED, LINEAR, TWO_DIMENSIONS, MIXED, GROWING)  # as many values as one says
# As few bytes as one says: all rows narrower, ids hashed to rows, and `rowhaul train --memory-budget`.
UNIFORM, HASHING, BUDGET = "smaller rows", "hashing", "--memory-budget"

Tables = list[EmbeddingBagConfig]


@dataclass(frozen=True)
class Case:
    """One way to hold rows: a method and how much it keeps.

    Args:
        method: one of the names above.
        ratio: the share of values that goes.
        chunks: of a row, where rows are cut.
        ratios: by place in a row, where rows are cut.
        utility: by which pieces of rows are kept.
        dim: of rows, where they are narrower or hashed; columns that 2-D keeps.
        share: of the unpruned run's bytes that it may take, in place of a ratio.
        version: of the method, so that results of an earlier one are not taken for its own.
    """

    method: str
    ratio: float = 0.0
    chunks: int = CHUNKS
    ratios: str = "adaptive"
    utility: str = "gradient"
    dim: int = 0
    share: float = 0.0
    version: int = 0

    def pruning(self, source: Source, num_steps: int) -> PruneSettings | None:
        """The settings of methods that prune."""
        cut = PruneSettings(
            ratio=self.ratio,
            chunks=self.chunks,
            period=min(PERIOD, num_steps),
            decay=source.decay if self.utility == "gradient" else 0.0,
            ratios=self.ratios,
            utility=self.utility,
        )
        if self.method == ADAEMBED:
            return replace(cut, chunks=1)
        if self.method == FIITED:
            return cut
        if self.method == LINEAR:
            return replace(cut, ratios="linear")
        if self.method == TWO_DIMENSIONS:
            # Fewer columns first, and of what is left so much that the whole is the ratio.
            dims = self.dim or max(source.dim // source.cut, math.floor(source.dim * (1 - self.ratio)))
            rest = max(0.0, 1 - (1 - self.ratio) * source.dim / dims)
            return replace(cut, ratio=rest, dims=dims, cold_start=max(1, num_steps // 5))
        return None

    def afford(self, config: TrainConfig, source: Source, log: Log, budget: int) -> PruneSettings | None:
        """The same, with the smallest ratio that takes no more than ``budget`` bytes, where there is one."""
        settings = self.pruning(source, len(log.train))
        if settings is None or not budget:
            return settings
        ratio = pruned_ratio(settings, source.dim, config.row_rule(), log.num_rows, budget)
        return replace(settings, ratio=ratio)


class MethodTrainer(Trainer):
    """The trainer of `rowhaul train`, with rows held as a case says, in ``budget`` bytes where it has any."""

    def __init__(self, config: TrainConfig, log: Log, source: Source, case: Case, budget: int = 0) -> None:
        super().__init__(config, log.schema)
        if case.method == BUDGET:  # that is in the configuration, as any user has it
            return
        self.model = build_model(
            config.model.name,
            tables=log.schema.tables,
            num_dense=len(log.schema.dense),
            embedding_dim=config.model.embedding_dim,
            make_collection=partial(make_collection, config, log, source, case, budget),
            seed=config.seed,
            options=config.model.options,
        )
        self.rows = RowOptimizer(self.model)
        self.dense = config.dense_optimizer(list(self.model.parameters()))


def make_collection(
    config: TrainConfig, log: Log, source: Source, case: Case, budget: int, tables: Tables
) -> nn.Module:
    """The rows of a case."""
    rule, seed, dim = config.row_rule(), config.seed, config.model.embedding_dim
    if case.method == MIXED:
        if budget:
            dims = mixed_dims(log.num_rows, log.num_reads, dim, rule, budget)
        else:
            dims = popularity_dims(log.num_rows, log.num_reads, dim, 1 - case.ratio)
        return MixedDimensions(tables, dims, rule, seed)
    if case.method == GROWING:
        return GrowingCollection(tables, optimizer=rule, seed=seed, share=1 - case.ratio, period=PERIOD)
    if case.method == HASHING:
        rows = hashed_rows(log.num_rows, 4 * (dim + rule.state_width(dim)), budget)
        return HashedRows(tables, rows, log.num_rows, rule, seed)
    collection = EmbeddingBagCollection(
        tables,
        optimizer=rule,
        seed=seed,
        on_unknown="default",
        pruning=case.afford(config, source, log, budget),
    )
    if budget and isinstance(collection.source, PrunedRows):
        limit_entries(collection.source, log.num_rows)
    return collection


def held_bytes(trainer: Trainer) -> int:
    """Bytes of rows, state, index and whatever the method adds to them, as allocated."""
    return trainer.collection.allocated_bytes + _projection_bytes(trainer)


def used_bytes(trainer: Trainer) -> int:
    """The same without what is allocated ahead of need: blocks of records that are not full yet.

    Tables of some thousand rows are mostly such blocks. Rowhaul's own budget is for what is allocated, and is
    not spared them.
    """
    hashed = next((one for one in trainer.model.modules() if isinstance(one, HashedRows)), None)
    if hashed is not None:
        return hashed.allocated_bytes
    source = trainer.collection.source
    is_budgeted = trainer.config.prune.settings() is not None
    if is_budgeted or isinstance(trainer.collection, GrowingCollection):  # growing rows lie elsewhere
        return held_bytes(trainer)
    used = _projection_bytes(trainer)
    for tables in source.tables:
        used += tables.arena.num_records * tables.arena.record_bytes
        if isinstance(source, PrunedRows):
            entries = tables.map.entries.arena
            used += entries.num_records * entries.record_bytes + tables.map.index.allocated_bytes
        else:
            used += tables.index.allocated_bytes
    return used


def _projection_bytes(trainer: Trainer) -> int:
    return sum(p.nbytes for name, p in trainer.model.named_parameters() if "projections" in name)


def value_bytes(trainer: Trainer) -> int:
    """Bytes of the values alone that rows hold; 0 where a budget is for everything and does not tell."""
    if trainer.config.prune.settings() is not None:
        return 0
    collection = trainer.collection
    report = collection.source.report() if isinstance(collection, EmbeddingBagCollection) else None
    if report is not None:
        return report.value_bytes
    if isinstance(collection, GrowingCollection):
        return 4 * collection.store.num_values
    configs = collection.embedding_bag_configs()
    return 4 * sum(one.embedding_dim * collection.num_rows(one.name) for one in configs)


def use_one_thread() -> None:
    """Runs go side by side: one thread each."""
    torch.set_num_threads(1)
