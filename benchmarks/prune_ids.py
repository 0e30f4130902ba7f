"""Ids for `prune_step.py`: those of the Criteo-like log, or drawn by a power law; and all rows there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rowhaul.data.generate import LogGenerator
from rowhaul.nn import KeyedJaggedTensor

MIX = 0x9E3779B97F4A7C15

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ids:
    """Tables by how many rows they are filled with, and batches that read them for ever."""

    features: list[str]
    num_rows: list[int]
    batches: Iterator[KeyedJaggedTensor]

    def everything(self, slice_size: int) -> Iterator[KeyedJaggedTensor]:
        """Every row of every table once, so many a table at a time; of small tables nothing is left later."""
        for first in range(0, max(self.num_rows), slice_size):
            rows = [np.arange(first, max(first, min(first + slice_size, count))) for count in self.num_rows]
            lengths = [np.arange(slice_size) < len(some) for some in rows]
            yield jagged(self.features, rows, lengths)


def jagged(
    features: list[str], rows: Sequence[Int64s], lengths: Sequence[npt.ArrayLike]
) -> KeyedJaggedTensor:
    """Row numbers by feature as keys, as they come from a file: one id a bag, or none."""
    keys = (np.concatenate(rows).astype(np.uint64) * np.uint64(MIX)).view(np.int64)
    counts = np.concatenate([np.asarray(one, dtype=np.int64) for one in lengths])
    ids = KeyedJaggedTensor(features, torch.from_numpy(keys), lengths=torch.from_numpy(counts))
    ids.offsets()
    return ids


def criteo_like(num_rows: int, batch_size: int) -> Ids:
    """The 26 features of the generated log, tables as skewed and as unequal as there.

    Small tables are whole; the large ones, which have no end, hold their most popular rows, as many each.
    """
    generator = LogGenerator("criteo", rows=1 << 40)
    supports = np.array([field.law.support for field in generator.preset.ids])
    least, most = 0, num_rows
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (
            (middle, most) if np.minimum(supports, middle).sum() <= num_rows else (least, middle - 1)
        )
    features = [field.name for field in generator.preset.ids]
    return Ids(features, np.minimum(supports, least).tolist(), _of_log(generator, features, batch_size))


def _of_log(generator: LogGenerator, features: list[str], batch_size: int) -> Iterator[KeyedJaggedTensor]:
    for samples in generator.samples():
        columns = samples.columns
        for first in range(0, len(samples.labels) - batch_size + 1, batch_size):
            some = slice(first, first + batch_size)
            there = [~missing[some] for missing in columns.missing_ids]
            rows = [ranks[some][one] for ranks, one in zip(columns.ranks, there, strict=True)]
            yield jagged(features, rows, there)


def by_power_law(num_rows: int, batch_size: int, num_tables: int, skew: float) -> Ids:
    """Equal tables whose rows are read by a power law: most reads go to few rows, the rest to all others."""
    features = [f"f{t}" for t in range(num_tables)]
    per_table = num_rows // num_tables
    return Ids(features, [per_table] * num_tables, _drawn(features, per_table, batch_size, skew))


def _drawn(features: list[str], num_rows: int, batch_size: int, skew: float) -> Iterator[KeyedJaggedTensor]:
    random = np.random.default_rng(0)
    once = [np.ones(batch_size)] * len(features)
    while True:
        uniform = random.random((len(features), batch_size))
        if abs(skew - 1) < 1e-9:
            rows = num_rows**uniform
        else:
            top = num_rows ** (1 - skew)
            rows = (uniform * (top - 1) + 1) ** (1 / (1 - skew))
        yield jagged(features, list(np.minimum(rows, num_rows - 1).astype(np.int64)), once)
