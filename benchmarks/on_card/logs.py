"""Logs and settings of the benchmarks of a card: raw ids of 26 features, in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rowhaul.data.generate.generator import LogGenerator
from rowhaul.data.samples import Samples
from rowhaul.data.schema import DenseColumn, IdColumn, LabelColumn, Schema
from rowhaul.train.config import ModelConfig, OptimizerConfig, TrainConfig

FEATURES, DENSE = 26, 13
LAYERS = {"bottom": [], "top": [1024, 512]}


def skewed(random: np.random.Generator, size: int, below: int) -> np.ndarray:
    """Ids whose logarithm is uniform: the first few are read in every batch."""
    return (below ** random.random(size)).astype(np.int64) - 1


class Log:
    """Ids of each feature and sample, in memory; and all rows that there are, by feature."""

    def __init__(self, name: str, ids: np.ndarray, rows: list[np.ndarray]) -> None:
        self.name, self.ids, self.rows = name, ids, rows

    @classmethod
    def criteo_like(cls, num_samples: int) -> Log:
        """Generate a log of Criteo's shape: a few of its tables hold most rows."""
        parts = [one.columns.ranks for one in LogGenerator("criteo", num_samples).samples()]
        ids = np.stack([np.concatenate(field) for field in zip(*parts, strict=True)])
        return cls("a log of Criteo's shape", ids, [np.unique(one) for one in ids])

    @classmethod
    def skewed(cls, num_samples: int, num_rows: int) -> Log:
        """Draw skewed ids over tables of one size."""
        random, per_table = np.random.default_rng(0), num_rows // FEATURES
        ids = np.stack([skewed(random, num_samples, per_table) for _ in range(FEATURES)])
        return cls("skewed ids", ids, [np.arange(per_table)] * FEATURES)

    def samples(self, size: int) -> Iterator[Samples]:
        """Batches, one after the other."""
        random = np.random.default_rng(0)
        for first in range(0, self.ids.shape[1] - size + 1, size):
            yield samples_of(random, criteo_schema()[0], self.ids[:, first : first + size], first // size)


def keys_of(ids: np.ndarray) -> np.ndarray:
    """Keys as raw logs have them: far apart."""
    return ids * 7919 + 5


def criteo_schema() -> tuple[list[str], Schema]:
    names = [f"C{number}" for number in range(FEATURES)]
    schema = Schema(
        LabelColumn("label"),
        tuple(DenseColumn(f"I{number}") for number in range(DENSE)),
        tuple(IdColumn(name) for name in names),
    )
    return names, schema


def dlrm_config(dim: int, num_samples: int, device_memory: str = "") -> TrainConfig:
    return TrainConfig(
        model=ModelConfig("dlrm", dim, dict(LAYERS)),
        rows=OptimizerConfig("rowwise_adagrad", 0.05),
        batch_size=num_samples,
        device="cuda",
        device_memory=device_memory,
    )


def samples_of(random: np.random.Generator, names: list[str], ids: np.ndarray, number: int) -> Samples:
    num_samples = ids.shape[1]
    return Samples(
        features=tuple(names), values=keys_of(ids).reshape(-1),
        lengths=np.ones(ids.shape, np.int32),
        dense=random.random((num_samples, DENSE)).astype(np.float32),
        labels=(random.random(num_samples) < 0.3).astype(np.float32),
        index=np.arange(num_samples) + number * num_samples,
    )  # fmt: skip
