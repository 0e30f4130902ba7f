"""Models over pooled rows beside the same models over `torch.nn.EmbeddingBag`: what they learn, and how fast.

The peer is the very same module over `EmbeddingBag` tables (sparse gradients, `torch.optim.Adagrad`;
`torch.optim.Adam` for the dense part) with the same batches, seeds and epochs. Its ids are numbered before
anything is timed, since `EmbeddingBag` takes numbers and Rowhaul takes keys. Both train by turns and see the
same machine; speeds are of processor time, on one thread.

    python benchmarks/pooled_models.py                          # generated logs and MovieLens-1M, 3 seeds
    python benchmarks/pooled_models.py --models dcnv2 --seeds 1 --rows 50_000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from datasets import movielens_1m
from report import console, print_machine, print_table
from rowhaul.data.generate.folder import generate_folder
from rowhaul.data.preparing import prepare
from rowhaul.data.samples import Samples
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.nn import (
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    RowOptimizer,
)
from rowhaul.nn.models import MODELS, MultiTaskModel, build_model
from rowhaul.optim import Adagrad
from rowhaul.train.losses import LossConfig, TaskLosses

DIM, ROW_LR, DENSE_LR = 16, 0.05, 0.001
RANGE = 0.01  # of first values
BATCH_SIZE = 1024


class PlainBags(nn.Module):
    """`torch.nn.EmbeddingBag` tables in place of a collection; ids are row numbers."""

    def __init__(self, configs: Sequence[EmbeddingBagConfig], sizes: dict[str, int], seed: int) -> None:
        super().__init__()
        self.configs = list(configs)
        generator = torch.Generator().manual_seed(seed)
        self.tables = nn.ModuleDict()
        for one in configs:
            weight = torch.empty(sizes[one.name], one.embedding_dim)
            weight.uniform_(-RANGE, RANGE, generator=generator)
            bag = nn.EmbeddingBag(
                *weight.shape, mode="sum", sparse=True, include_last_offset=True, _weight=weight
            )
            self.tables[one.name] = bag

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return what the model asks a collection for."""
        return self.configs

    table_configs = embedding_bag_configs

    def forward(self, ids: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the rows of every feature."""
        pairs = [(one.name, feature) for one in self.configs for feature in one.feature_names]
        pooled = [self.tables[table](ids[name].values(), ids[name].offsets()) for table, name in pairs]
        names = [name for _, name in pairs]
        return KeyedTensor(names, [one.shape[1] for one in pooled], torch.cat(pooled, dim=1))


class Side:
    """One way to train: a model, what steps it, and the time that it took."""

    def __init__(self, name: str, schema: Schema, make: Callable[..., nn.Module], seed: int) -> None:
        self.model = build_model(
            name,
            tables=schema.tables,
            num_dense=len(schema.dense),
            embedding_dim=DIM,
            make_collection=make,
            seed=seed,
            num_tasks=len(schema.tasks),
        )
        self.losses = TaskLosses(schema, LossConfig(), self.model)
        tables, self.rows = self.model.collection, None
        of_tables = {id(one) for one in tables.parameters()}
        if isinstance(tables, PlainBags):
            self.rows = torch.optim.Adagrad(tables.parameters(), lr=ROW_LR, eps=1e-8)
        else:
            self.rows = RowOptimizer(self.model)
        dense = [one for one in self.model.parameters() if id(one) not in of_tables]
        self.dense = torch.optim.Adam(dense, lr=DENSE_LR)
        self.seconds, self.samples = 0.0, 0

    def train(self, batch: Batch) -> None:
        """Take a step."""
        began = time.process_time()
        batch.loss(self.losses(self.model(batch), batch)).backward()
        for one in (self.rows, self.dense):
            one.step()
            one.zero_grad()
        self.seconds += time.process_time() - began
        self.samples += len(batch)

    def auc(self, batches: Sequence[Batch]) -> float:
        """Measure the last label: of several the hardest."""
        self.model.eval()
        with torch.no_grad():
            scores = np.concatenate([self.model(one).reshape(len(one), -1)[:, -1].numpy() for one in batches])
        targets = [self.model.targets(one.labels.reshape(len(one), -1))[:, -1].numpy() for one in batches]
        labels = np.concatenate(targets)
        known = ~np.isnan(labels)
        return float(roc_auc_score(labels[known], scores[known]))


class Numbers:
    """Row numbers of the ids of each table, given out before anything is timed."""

    def __init__(self, schema: Schema, every: Sequence[Samples]) -> None:
        self._table_of = {column.name: column.table for column in schema.ids}
        found: dict[str, list[np.ndarray]] = {}
        for samples in every:
            for name, ids in zip(samples.features, samples.ids_of_features(), strict=True):
                found.setdefault(self._table_of[name], []).append(ids)
        self._keys = {table: np.unique(np.concatenate(parts)) for table, parts in found.items()}
        self.sizes = {table: len(keys) for table, keys in self._keys.items()}

    def batch(self, samples: Samples) -> Batch:
        """Make a batch of row numbers."""
        values = [
            np.searchsorted(self._keys[self._table_of[name]], ids)
            for name, ids in zip(samples.features, samples.ids_of_features(), strict=True)
        ]
        return Batch.from_samples(replace(samples, values=np.concatenate(values)))


def measure(name: str, folder: Path, seed: int, rows: int) -> list[tuple[float, float]]:
    """Train both sides; return AUC and samples a processor second of each."""
    schema = Schema.read(folder / "schema.yaml")
    train = [*SampleStream(folder, schema, BATCH_SIZE, shuffle_rows=65_536, seed=seed, limit=rows)]
    test = [*SampleStream(folder / "test", schema, BATCH_SIZE, limit=rows)]
    numbers = Numbers(schema, [*train, *test])
    optimizer = Adagrad(lr=ROW_LR, eps=1e-8)
    sides = [
        Side(
            name, schema, lambda tables: EmbeddingBagCollection(tables, optimizer=optimizer, seed=seed), seed
        ),
        Side(name, schema, lambda tables: PlainBags(tables, numbers.sizes, seed), seed),
    ]
    makes = (Batch.from_samples, numbers.batch)
    for place, samples in enumerate(train):
        for side, make in zip(sides, makes, strict=True):
            side.train(make(samples))
            if place == 0:  # kernels may have been compiled
                side.seconds, side.samples = 0.0, 0
    aucs = [side.auc([make(samples) for samples in test]) for side, make in zip(sides, makes, strict=True)]
    return [(auc, side.samples / side.seconds) for auc, side in zip(aucs, sides, strict=True)]


def compare(names: Sequence[str], folder: Path, seeds: int, rows: int) -> Iterator[list[object]]:
    """Yield a line for each model."""
    for name in names:
        found = [measure(name, folder, seed, rows) for seed in range(seeds)]
        line: list[object] = [name]
        for side in (0, 1):
            aucs = [one[side][0] for one in found]
            line.append(f"{statistics.mean(aucs):.4f} ± {np.std(aucs):.4f}")
        line += [statistics.median(one[side][1] for one in found) for side in (0, 1)]
        yield [*line, f"{statistics.median(one[0][1] / one[1][1] for one in found):.2f}x"]


def main() -> None:
    """Print a table for each log."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--logs", default="criteo,movielens-1m,conversions")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=200_000, help="to train on at most, and to test on")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_machine("scikit-learn")
    console.print("One thread; samples a second of processor time.")
    wanted = arguments.models.split(",")
    several = [name for name in wanted if issubclass(MODELS[name], MultiTaskModel)]
    one = [name for name in wanted if MODELS[name].least_tasks == 1 and name not in several]
    with tempfile.TemporaryDirectory() as temporary:
        for log in arguments.logs.split(","):
            folder = Path(temporary) / log
            if log == "movielens-1m":
                prepare(movielens_1m(), folder, "movielens")
            else:
                preset = "movielens" if log == "conversions" else log
                generate_folder(preset, round(arguments.rows / 0.9), folder, conversions=log == "conversions")
            names = several if log == "conversions" else one
            print_table(
                f"{log}, {arguments.seeds} seed(s), one pass",
                ["", "AUC", "PyTorch", "samples/s", "PyTorch", "ratio"],
                list(compare(names, folder, arguments.seeds, arguments.rows)),
            )


if __name__ == "__main__":
    main()
