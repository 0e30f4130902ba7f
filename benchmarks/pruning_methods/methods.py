"""The methods by name: each makes the collection that a model reads rows through; the rest is the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from pruning_methods.growing import GrowingCollection
from pruning_methods.logs import Log, Source
from pruning_methods.mixed import MixedDimensions, popularity_dims
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, RowOptimizer
from rowhaul.nn.models import build_model
from rowhaul.pruning import PruneSettings
from rowhaul.train import TrainConfig
from rowhaul.train.trainer import Trainer

DENSE_RATE = 0.002
PERIOD = 20  # steps between prunings: logs here are some hundred steps, not days
CHUNKS = 4

UNPRUNED, ADAEMBED, FIITED, LINEAR = "unpruned", "AdaEmbed (K = 1)", "FIITED", "FIITED, linear ratios"
ACCESS = "by accesses"  # Rowhaul's default
TWO_DIMENSIONS, MIXED, GROWING = "FIITED 2-D", "mixed dimensions", "growing (as ESAPN)"
METHODS = (UNPRUNED, ADAEMBED, FIITED, LINEAR, ACCESS, TWO_DIMENSIONS, MIXED, GROWING)
PRUNING = (ADAEMBED, FIITED, LINEAR, ACCESS, TWO_DIMENSIONS)  # those that Rowhaul's pruning does

Tables = list[EmbeddingBagConfig]


@dataclass(frozen=True)
class Case:
    """One way to hold rows: a method, the share of values that goes, chunks of a row where that matters."""

    method: str
    ratio: float = 0.0
    chunks: int = CHUNKS
    ratios: str = "adaptive"
    budget: int = 0

    def pruning(self, source: Source, num_steps: int) -> PruneSettings | None:
        """The settings of methods that prune."""
        cut = PruneSettings(
            ratio=self.ratio,
            budget=self.budget,
            chunks=self.chunks,
            period=min(PERIOD, num_steps),
            decay=source.decay,
            ratios=self.ratios,
            utility="gradient",
        )
        if self.method == ADAEMBED:
            return replace(cut, chunks=1)
        if self.method == FIITED:
            return cut
        if self.method == LINEAR:
            return replace(cut, ratios="linear")
        if self.method == ACCESS:
            return replace(cut, utility="access", ratios="linear", decay=0.0)
        if self.method == TWO_DIMENSIONS:
            # Fewer columns first, and of what is left so much that the whole is the ratio.
            dims = max(source.dim // source.cut, math.floor(source.dim * (1 - self.ratio)))
            rest = max(0.0, 1 - (1 - self.ratio) * source.dim / dims)
            return replace(cut, ratio=rest, dims=dims, cold_start=max(1, num_steps // 5))
        return None

    def reaches(self, dim: int) -> bool:
        """Whether the method can leave so little: rows of some have a least size."""
        least = {MIXED: 1 / dim, GROWING: 2 / dim}.get(self.method, 0.0)
        return 1 - self.ratio >= least


class MethodTrainer(Trainer):
    """The trainer of `rowhaul train`, with rows held as a case says."""

    def __init__(self, config: TrainConfig, log: Log, source: Source, case: Case) -> None:
        super().__init__(config, log.schema)
        self.model = build_model(
            config.model.name,
            tables=log.schema.tables,
            num_dense=len(log.schema.dense),
            embedding_dim=config.model.embedding_dim,
            make_collection=partial(make_collection, config, log, source, case),
            seed=config.seed,
            options=config.model.options,
        )
        self.rows = RowOptimizer(self.model)
        self.dense = config.dense_optimizer(list(self.model.parameters()))


def make_collection(config: TrainConfig, log: Log, source: Source, case: Case, tables: Tables) -> nn.Module:
    """The rows of a case."""
    rule, seed, dim = config.row_rule(), config.seed, config.model.embedding_dim
    if case.method == MIXED:
        dims = popularity_dims(log.num_rows, log.num_reads, dim, 1 - case.ratio)
        return MixedDimensions(tables, dims, rule, seed)
    if case.method == GROWING:
        return GrowingCollection(tables, optimizer=rule, seed=seed, share=1 - case.ratio, period=PERIOD)
    return EmbeddingBagCollection(
        tables,
        optimizer=rule,
        seed=seed,
        on_unknown="default",
        pruning=case.pruning(source, len(log.train)),
    )


def held_bytes(trainer: Trainer) -> int:
    """Bytes of rows, state, index and whatever the method adds to them, as allocated."""
    added = [p for name, p in trainer.model.named_parameters() if "projections" in name]
    return trainer.collection.allocated_bytes + sum(parameter.nbytes for parameter in added)


def value_bytes(trainer: Trainer) -> int:
    """Bytes of the values alone that rows hold."""
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
