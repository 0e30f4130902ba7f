"""The id traces that the papers' figures are redone on, held in memory as plain columns of keys."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasets import CACHE, movielens_1m
from rowhaul.data.generate import LogGenerator
from rowhaul.schedule import IdBatch


@dataclass(frozen=True)
class Trace:
    """The ids of some consecutive samples, one column of keys a feature, one table a feature."""

    name: str
    keys: tuple[npt.NDArray[np.int64], ...]  # features, each of all samples
    present: tuple[npt.NDArray[np.bool_], ...]  # features: whether the sample has an id of it
    columns: tuple[str, ...]
    num_rows: int  # distinct (table, key) pairs of the log: what cache ratios are shares of

    def __len__(self) -> int:
        return len(self.keys[0])

    @property
    def num_tables(self) -> int:
        return len(self.keys)

    def first(self, samples: int) -> Trace:
        """The beginning of the trace."""
        if samples > len(self):
            raise ValueError(f"{self.name} has {len(self):,} samples, {samples:,} are needed")
        return Trace(
            self.name,
            tuple(keys[:samples] for keys in self.keys),
            tuple(has[:samples] for has in self.present),
            self.columns,
            self.num_rows,
        )

    def batches(self, size: int) -> Callable[[], Iterator[IdBatch]]:
        """Whole global batches of this size, anew at every call; what is left over is dropped."""

        def read() -> Iterator[IdBatch]:
            tables = range(self.num_tables)
            for start in range(0, len(self) - size + 1, size):
                part = slice(start, start + size)
                lengths = np.stack([has[part] for has in self.present]).astype(np.int32)
                values = [keys[part][has[part]] for keys, has in zip(self.keys, self.present, strict=True)]
                yield IdBatch.from_features(tables, np.concatenate(values), lengths)

        return read


@cache
def generated(preset: str, samples: int, seed: int = 0) -> Trace:
    """The first samples of a generated log; a missing value is no id, as in training."""
    generator = LogGenerator(preset, samples, seed)
    table = pa.Table.from_batches(generator.batches())
    columns = tuple(column.name for column in generator.schema.ids)
    keys, present = [], []
    for name in columns:
        column = table[name].combine_chunks()
        present.append(column.is_valid().to_numpy(zero_copy_only=False))
        keys.append(column.fill_null(0).to_numpy())
    num_rows = sum(len(np.unique(every[has])) for every, has in zip(keys, present, strict=True))
    return Trace(preset, tuple(keys), tuple(present), columns, num_rows)


@cache
def movielens(samples: int) -> Trace:
    """The first ratings of MovieLens-1M in the order of time: user and movie, as Herald uses them."""
    stored = CACHE / "ml-1m-in-time-order.npy"
    if not stored.exists():
        with zipfile.ZipFile(movielens_1m()) as archive:
            (name,) = [one for one in archive.namelist() if one.endswith("ratings.dat")]
            lines = archive.read(name).replace(b"::", b",").decode().splitlines()
        ratings = np.array([line.split(",") for line in lines], dtype=np.int64)
        np.save(stored, ratings[np.argsort(ratings[:, 3], kind="stable"), :2])
    ids = np.load(stored)
    everywhere = np.ones(len(ids), np.bool_)
    columns = tuple(np.ascontiguousarray(column) for column in ids.T)
    num_rows = sum(len(np.unique(column)) for column in columns)
    whole = Trace("movielens-1m", columns, (everywhere, everywhere), ("user", "movie"), num_rows)
    return whole.first(samples)
