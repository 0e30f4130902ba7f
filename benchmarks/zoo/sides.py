"""Two sides train by turns, on the same batches: this library's, and plain PyTorch's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from rowhaul.nn import Batch, EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, RowOptimizer
from rowhaul.nn.models import build_model
from rowhaul.optim import Adagrad
from rowhaul.train.losses import LossConfig, TaskLosses
from zoo.plain_tables import PlainTables, plain_tables, use_plain_operations

DIM, ROW_LR, DENSE_LR = 16, 0.05, 0.001
CANDIDATES = 101  # the next item, and others that it is ranked among


def our_tables(configs: Sequence[Any], seed: int) -> nn.Module:
    """A collection as a model asks for it."""
    kind = EmbeddingBagCollection if isinstance(configs[0], EmbeddingBagConfig) else EmbeddingCollection
    return kind(list(configs), optimizer=Adagrad(lr=ROW_LR, eps=1e-8), seed=seed)


class Side:
    """One way to train: a model, what steps it, and the processor time that it took."""

    def __init__(
        self,
        name: str,
        schema: Schema,
        make: Callable[..., nn.Module],
        seed: int,
        dim: int = DIM,
        dense_lr: float = DENSE_LR,
        fused: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = build_model(
            name,
            tables=schema.tables,
            num_dense=len(schema.dense),
            embedding_dim=dim,
            make_collection=make,
            seed=seed,
            options=options,
            num_tasks=max(1, len(schema.tasks)),
            histories=schema.histories,
            negatives={one.name: one.negatives_of for one in schema.negatives},
        )
        self.losses = TaskLosses(schema, LossConfig(), self.model)
        tables = self.model.collection
        self.rows: torch.optim.Optimizer
        if isinstance(tables, PlainTables):
            self.rows = torch.optim.Adagrad(tables.parameters(), lr=ROW_LR, eps=1e-8)
        else:
            self.rows = RowOptimizer(self.model)
            fused = True  # as `rowhaul train` does by itself
        of_tables = {id(one) for one in tables.parameters()}
        dense = [one for one in self.model.parameters() if id(one) not in of_tables]
        self.dense = torch.optim.Adam(dense, lr=dense_lr, fused=fused or None)
        self.seconds, self.samples = 0.0, 0

    def train(self, batch: Batch) -> None:
        """Take a step."""
        began = time.process_time()
        self.model.train()
        _, losses = self.model.logits_and_losses(batch, self.losses)
        batch.loss(losses).backward()
        for one in (self.rows, self.dense):
            one.step()
            one.zero_grad()
        self.seconds += time.process_time() - began
        self.samples += len(batch)

    def sparse_seconds(self, batch: Batch) -> float:
        """Processor time of reading the rows of a batch and stepping them, by gradients of one."""
        collection = self.model.collection.train()
        began = time.process_time()
        found = collection(batch.ids)
        parts = [one.values() for one in found.values()] if isinstance(found, dict) else [found.values()]
        torch.autograd.backward(parts, [torch.ones_like(one) for one in parts])
        self.rows.step()
        self.rows.zero_grad()
        return time.process_time() - began

    def scores(self, batches: Sequence[Batch]) -> Any:
        """Logits of the last label: of several the hardest."""
        self.model.eval()
        with torch.no_grad():
            return np.concatenate([self.model(one).reshape(len(one), -1)[:, -1].numpy() for one in batches])

    def auc(self, batches: Sequence[Batch]) -> float:
        """Measure the last label."""
        scores = self.scores(batches)
        targets = [self.model.targets(one.labels.reshape(len(one), -1))[:, -1].numpy() for one in batches]
        labels = np.concatenate(targets)
        known = ~np.isnan(labels)
        return float(roc_auc_score(labels[known], scores[known]))

    def ndcg(self, batches: Sequence[Batch]) -> float:
        """NDCG@10 of the first of every `CANDIDATES` samples."""
        scores = self.scores(batches).reshape(-1, CANDIDATES)
        ranks = (scores[:, 1:] >= scores[:, :1]).sum(axis=1)
        return float(np.where(ranks < 10, 1 / np.log2(ranks + 2), 0).mean())


class Numbers:
    """Row numbers of the ids of each table, given out before anything is timed."""

    def __init__(self, schema: Schema, every: Sequence[Samples]) -> None:
        self._table_of = {column.name: column.table for column in schema.ids}
        found: dict[str, list[Any]] = {}
        for samples in every:
            for name, ids in zip(samples.features, samples.ids_of_features(), strict=True):
                found.setdefault(self._table_of[name], []).append(ids)
        self.keys = {table: np.unique(np.concatenate(parts)) for table, parts in found.items()}
        self.sizes = {table: len(keys) for table, keys in self.keys.items()}

    def of_features(self, samples: Samples) -> list[npt.NDArray[np.int64]]:
        """Row numbers of the ids of each feature."""
        return [
            np.searchsorted(self.keys[self._table_of[name]], ids)
            for name, ids in zip(samples.features, samples.ids_of_features(), strict=True)
        ]

    def batch(self, samples: Samples) -> Batch:
        """Make a batch of row numbers."""
        return Batch.from_samples(replace(samples, values=np.concatenate(self.of_features(samples))))


@dataclass(frozen=True)
class Measured:
    """What one seed found, ours first, then the peer's."""

    quality: tuple[float, float]
    rate: tuple[float, float]  # samples a processor second
    sparse: tuple[float, float]  # processor seconds of the sparse part, a sample

    @property
    def limit(self) -> float:
        """How many times as fast the peer would be if rows took no time."""
        return 1 / (1 - self.rate[1] * self.sparse[1])


def measure(
    name: str,
    schema: Schema,
    train: Sequence[Samples],
    test: Sequence[Samples],
    seed: int,
    *,
    ranks: bool,
    fused_peer: bool = False,
) -> Measured:
    """Train both sides by turns, so that they see the same machine.

    The peer's Adam is PyTorch's default, unless ``fused_peer`` asks for the one that takes a single pass.
    """
    numbers = Numbers(schema, [*train, *test])
    sides = [
        Side(name, schema, lambda configs: our_tables(configs, seed), seed),
        Side(
            name, schema, lambda configs: plain_tables(configs, numbers.sizes, seed), seed, fused=fused_peer
        ),
    ]
    use_plain_operations(sides[1].model)
    makes: tuple[Callable[[Samples], Batch], ...] = (Batch.from_samples, numbers.batch)
    for place, samples in enumerate(train):
        for side, make in zip(sides, makes, strict=True):
            side.train(make(samples))
            if place == 0:  # kernels may have been compiled
                side.seconds, side.samples = 0.0, 0
    found = []
    for side, make in zip(sides, makes, strict=True):
        tests = [make(samples) for samples in test]
        found.append(side.ndcg(tests) if ranks else side.auc(tests))
    sparse, last = [0.0, 0.0], train[-20:]
    for samples in last:
        for number, (side, make) in enumerate(zip(sides, makes, strict=True)):
            sparse[number] += side.sparse_seconds(make(samples)) / sum(map(len, last))
    rates = [side.samples / side.seconds for side in sides]
    return Measured((found[0], found[1]), (rates[0], rates[1]), (sparse[0], sparse[1]))


def candidates(samples: Samples, every: npt.NDArray[np.int64], most: int, seed: int) -> Samples:
    """Samples, each among others with another movie; the true one comes first.

    The others are drawn from all movies, each once, but for those that the user has seen: a history tells
    that these come no more.
    """
    true = samples.take(np.arange(min(most, len(samples))))
    ids = dict(zip(true.features, true.ids_of_features(), strict=True))
    ends = np.cumsum(true.lengths[true.features.index("history")])[:-1]
    random, among = np.random.default_rng(seed), []
    for movie, seen in zip(ids["movie"], np.split(ids["history"], ends), strict=True):
        others = np.setdiff1d(every, np.append(seen, movie))
        among += [[movie], random.choice(others, CANDIDATES - 1, replace=False)]
    asked = true.take(np.repeat(np.arange(len(true)), CANDIDATES))
    ids, lengths = dict(zip(asked.features, asked.ids_of_features(), strict=True)), asked.lengths.copy()
    ids["movie"] = np.concatenate(among)
    ids["others"], lengths[asked.features.index("others")] = ids["others"][:0], 0
    return replace(asked, values=np.concatenate(list(ids.values())), lengths=lengths)
