"""Models beside the same models over plain PyTorch tables: what they learn, how fast, and what moves.

The peer is the very same module over `torch.nn.Embedding` tables (sparse gradients, `torch.optim.Adagrad`,
`torch.optim.Adam` for the dense part) with the same data, batches, seeds and epochs; its ids are numbered
before anything is timed, since `nn.Embedding` takes numbers and Rowhaul takes keys. A new model is a line in
`ZOO`.

    python benchmarks/models.py                        # all, MovieLens-1M, histories of 50
    python benchmarks/models.py --models din --seeds 1 --rows 100_000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from datasets import movielens_1m
from report import console, print_machine, print_table
from rowhaul.data.preparing import prepare
from rowhaul.data.samples import Samples
from rowhaul.data.schema import IdColumn, LabelColumn, Schema
from rowhaul.data.stream import SampleStream
from rowhaul.nn import (
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    RowOptimizer,
)
from rowhaul.nn.models import MODELS, RecommendationModel, build_model
from rowhaul.optim import Adagrad

DIM, ROW_LR, DENSE_LR = 32, 0.05, 0.001
HISTORY = 50
RANGE = 0.01  # of first values


def click_schema(schema: Schema) -> Schema:
    """All columns: whether a rating is 4 or more."""
    return schema


def pooled_schema(schema: Schema) -> Schema:
    """The same without histories."""
    return Schema(schema.label, schema.dense, tuple(one for one in schema.ids if one.max_length is None))


def next_item_schema(schema: Schema) -> Schema:
    """The movie after a history, against others."""
    movie = IdColumn("movie", type="integer")
    history = IdColumn("history", "movie", "integer", max_length=HISTORY)
    return Schema(
        LabelColumn("liked"),
        (),
        (movie, history, IdColumn("others", "movie", "integer", negatives_of="movie")),
    )


@dataclass(frozen=True)
class Entry:
    """A model of the benchmark: the columns it reads, and its options."""

    schema: Callable[[Schema], Schema] = pooled_schema
    options: dict[str, Any] | None = None


ZOO = {
    "din": Entry(click_schema),
    "sasrec": Entry(next_item_schema),
    "deepfm": Entry(),
    "dlrm": Entry(),
}


class PlainTables(nn.Module):
    """`torch.nn.Embedding` tables in place of a collection; ids are row numbers."""

    def __init__(self, configs: Sequence[EmbeddingConfig], sizes: dict[str, int], seed: int) -> None:
        super().__init__()
        self.configs = list(configs)
        self.tables = nn.ModuleDict(
            {one.name: nn.Embedding(sizes[one.name], one.embedding_dim, sparse=True) for one in configs}
        )
        generator = torch.Generator().manual_seed(seed)
        for table in self.tables.values():
            assert isinstance(table, nn.Embedding)
            table.weight.data.uniform_(-RANGE, RANGE, generator=generator)

    def table_configs(self) -> list[EmbeddingConfig]:
        return self.configs

    def forward(self, ids: KeyedJaggedTensor) -> Any:
        rows = {
            feature: JaggedTensor(
                self.tables[one.name](ids[feature].values()), lengths=ids[feature].lengths()
            )
            for one in self.configs
            for feature in one.feature_names
        }
        if not isinstance(self.configs[0], EmbeddingBagConfig):
            return rows
        pooled = [_summed(one) for one in rows.values()]
        return KeyedTensor(list(rows), [one.shape[1] for one in pooled], torch.cat(pooled, dim=1))


def _summed(rows: JaggedTensor) -> Tensor:
    if len(rows.values()) == len(rows.lengths()):
        return rows.values()
    owner = torch.arange(len(rows.lengths())).repeat_interleave(rows.lengths())
    return (
        rows.values()
        .new_zeros(len(rows.lengths()), rows.values().shape[1])
        .index_add(0, owner, rows.values())
    )


class Side:
    """One way to train: a model, what steps it, and its batches."""

    def __init__(
        self, name: str, schema: Schema, entry: Entry, make: Callable[..., nn.Module], seed: int
    ) -> None:
        self.model: RecommendationModel = build_model(
            name,
            tables=schema.tables,
            num_dense=len(schema.dense),
            embedding_dim=DIM,
            make_collection=make,
            seed=seed,
            options=entry.options,
            histories=schema.histories,
            negatives={one.name: one.negatives_of for one in schema.negatives},
        )
        tables = self.model.collection
        self.rows: torch.optim.Optimizer
        if isinstance(tables, PlainTables):
            self.rows = torch.optim.Adagrad(tables.parameters(), lr=ROW_LR, eps=1e-8)
        else:
            self.rows = RowOptimizer(self.model)
        plain = {id(one) for one in tables.parameters()}
        dense = [one for one in self.model.parameters() if id(one) not in plain]
        self.dense = torch.optim.Adam(dense, lr=DENSE_LR)
        self.seconds, self.samples = 0.0, 0

    def train(self, batch: Batch) -> None:
        began = time.process_time()
        self.model.train()
        _, losses = self.model.logits_and_losses(batch)
        batch.loss(losses).backward()
        for one in (self.rows, self.dense):
            one.step()
            one.zero_grad()
        self.seconds += time.process_time() - began
        self.samples += len(batch)

    def auc(self, batches: Sequence[Batch]) -> float:
        self.model.eval()
        with torch.no_grad():
            scores = np.concatenate([self.model(batch).numpy() for batch in batches])
        return float(roc_auc_score(np.concatenate([one.labels.numpy() for one in batches]), scores))

    def sparse_part(self, batches: Sequence[Batch]) -> float:
        """Processor seconds of reading rows and stepping them, by gradients of one."""
        collection = self.model.collection.train()
        began = time.process_time()
        for batch in batches:
            found = collection(batch.ids)
            parts = [one.values() for one in found.values()] if isinstance(found, dict) else [found.values()]
            torch.autograd.backward(parts, [torch.ones_like(one) for one in parts])
            self.rows.step()
            self.rows.zero_grad()
        return time.process_time() - began


class Numbers:
    """Row numbers of the ids of each table, given out before anything is timed."""

    def __init__(self, schema: Schema, every: Sequence[Samples]) -> None:
        self._schema, self._keys = schema, {}
        for table, features in schema.tables.items():
            parts = [
                ids
                for samples in every
                for name, ids in zip(samples.features, samples.ids_of_features(), strict=True)
                if name in features
            ]
            self._keys[table] = np.unique(np.concatenate(parts))
        self.sizes = {table: len(keys) for table, keys in self._keys.items()}

    def batch(self, samples: Samples) -> Batch:
        table_of = {column.name: column.table for column in self._schema.ids}
        values = [
            np.searchsorted(self._keys[table_of[name]], ids)
            for name, ids in zip(samples.features, samples.ids_of_features(), strict=True)
        ]
        return Batch.from_samples(
            Samples(
                samples.features, np.concatenate(values), samples.lengths, samples.dense, samples.labels,
                samples.index,
            )
        )  # fmt: skip


@dataclass
class Measured:
    """What one seed found, ours first, then the peer's."""

    auc: tuple[float, float]
    rate: tuple[float, float]  # samples a processor second
    sparse: tuple[float, float]  # processor seconds of the sparse part


def measure(name: str, folder: Path, arguments: argparse.Namespace, seed: int) -> Measured:
    entry = ZOO[name]
    schema = entry.schema(Schema.read(folder / "schema.yaml"))
    limit = arguments.rows or None
    size = arguments.batch_size
    train = [
        *SampleStream(
            folder, schema, size, epochs=arguments.epochs, shuffle_rows=65_536, seed=seed, limit=limit
        )
    ]
    test = [*SampleStream(folder / "test", schema, size, limit=limit)]
    numbers = Numbers(schema, [*train, *test])
    sides = [
        Side(name, schema, entry, lambda configs: _ours(configs, seed), seed),
        Side(name, schema, entry, lambda configs: PlainTables(configs, numbers.sizes, seed), seed),
    ]
    makes = [Batch.from_samples, numbers.batch]
    ours, peers = ([make(samples) for samples in train] for make in makes)
    for pair in zip(ours, peers, strict=True):  # by turns: both see the same machine
        for side, batch in zip(sides, pair, strict=True):
            side.train(batch)
    tests = [[make(samples) for samples in test] for make in makes]
    auc = [side.auc(batches) for side, batches in zip(sides, tests, strict=True)]
    sparse = [side.sparse_part(some[:20]) for side, some in zip(sides, (ours, peers), strict=True)]
    rate = [side.samples / side.seconds for side in sides]
    return Measured((auc[0], auc[1]), (rate[0], rate[1]), (sparse[0], sparse[1]))


def _ours(configs: Sequence[Any], seed: int) -> nn.Module:
    kind = EmbeddingBagCollection if isinstance(configs[0], EmbeddingBagConfig) else EmbeddingCollection
    return kind(list(configs), optimizer=Adagrad(lr=ROW_LR, eps=1e-8), seed=seed)


def moved(name: str, folder: Path, batch_size: int) -> tuple[int, int]:
    """Ids that some batches read, and the distinct rows of each batch, which are all that moves."""
    schema = ZOO[name].schema(Schema.read(folder / "schema.yaml"))
    read = distinct = 0
    for samples in SampleStream(folder, schema, batch_size, limit=20 * batch_size):
        by_table: dict[str, list[Any]] = {}
        table_of = {column.name: column.table for column in schema.ids}
        for feature, ids in zip(samples.features, samples.ids_of_features(), strict=True):
            by_table.setdefault(table_of[feature], []).append(ids)
            read += len(ids)
        distinct += sum(len(np.unique(np.concatenate(parts))) for parts in by_table.values())
    return read, distinct


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(ZOO))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=0, help="of training and of test; 0: all")
    parser.add_argument("--movielens", type=Path, help="the archive or its folder, if it is here already")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_machine("scikit-learn")
    console.print("One thread; processor time, so that other work on the machine counts less.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "data"
        prepare(arguments.movielens or movielens_1m(), folder, "movielens", history=HISTORY)
        print_table(
            f"MovieLens, histories of {HISTORY}, {arguments.epochs} epoch(s), {arguments.seeds} seed(s)",
            ["", "AUC", "PyTorch", "samples/s", "PyTorch", "ratio", "sparse part", "ids read", "rows moved"],
            list(_lines(arguments, folder)),
        )  # fmt: skip


def _lines(arguments: argparse.Namespace, folder: Path) -> Iterator[list[object]]:
    for name in arguments.models.split(","):
        assert name in MODELS, f"unknown model {name}"
        found = [measure(name, folder, arguments, seed) for seed in range(arguments.seeds)]
        read, distinct = moved(name, folder, arguments.batch_size)
        aucs = [[one.auc[side] for one in found] for side in (0, 1)]
        spread = [f"{statistics.mean(one):.4f} ± {np.std(one):.4f}" for one in aucs]
        rates = [statistics.median(one.rate[side] for one in found) for side in (0, 1)]
        ratio = statistics.median(one.rate[0] / one.rate[1] for one in found)
        sparse = statistics.median(one.sparse[1] / one.sparse[0] for one in found)
        yield [
            name,
            *spread,
            *rates,
            f"{ratio:.2f}x",
            f"{sparse:.2f}x",
            float(read),
            f"{distinct / read:.1%}",
        ]


if __name__ == "__main__":
    main()
