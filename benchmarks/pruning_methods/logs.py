"""The data that methods are compared on, in memory: batches to train on and later ones to score."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datasets import CACHE, movielens_1m
from rowhaul.data.generate.folder import generate_folder
from rowhaul.data.preparing import prepare
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.nn import Batch

TEST_SHARE = 0.25
MOVIELENS_TEST_SHARE = 0.1
_TEST_BATCH = 8192
LOGS = 2  # generation of the generated logs: another number when the generator changes


@dataclass(frozen=True)
class Source:
    """A data set: its name in tables, its samples if nothing else is said, and how it is trained on.

    Learning rates are those with which the unpruned model is best (of 0.005, 0.01, 0.02 and 0.05 for rows).
    A generated log has a preset; without one it is MovieLens-1M.
    """

    title: str
    samples: int
    dim: int
    batch_size: int
    row_rate: float = 0.02
    decay: float = 0.98  # of utilities
    cut: int = 2  # in two dimensions, rows become this many times narrower before any are pruned
    epochs: int = 1
    preset: str = ""
    rare_signal: bool = False  # labels hang on rare ids as much as on popular ones
    is_shuffled: bool = False


SOURCES = {
    "criteo": Source("Criteo-like", 300_000, 32, 1024, preset="criteo"),
    "avazu": Source("Avazu-like", 200_000, 32, 1024, preset="avazu"),
    "criteo-tb": Source("Terabyte-like", 200_000, 32, 1024, preset="criteo-tb"),
    # FIITED's size of rows for MovieLens.
    "movielens": Source(
        "MovieLens-1M", 1_000_209, 128, 2048, row_rate=0.05, decay=0.999, cut=8, is_shuffled=True
    ),
    "movielens-shuffled": Source(
        "MovieLens-1M, shuffled", 1_000_209, 32, 2048, row_rate=0.05, decay=0.999, is_shuffled=True
    ),
    "movielens-time": Source("MovieLens-1M, in time order", 1_000_209, 32, 2048, row_rate=0.05, decay=0.999),
    # Of a preset with few ids, so that each is seen often enough for its signal to be learned.
    "rare": Source(
        "rare ids carry signal",
        400_000,
        32,
        2048,
        row_rate=0.05,
        decay=0.999,
        preset="movielens",
        rare_signal=True,
    ),
}


@dataclass(frozen=True)
class Log:
    """Samples, the last quarter held out; of MovieLens, in the order of time or in random order, a tenth."""

    schema: Schema
    train: list[Batch]
    test: list[Batch]
    num_rows: npt.NDArray[np.int64]  # distinct ids by table, of the training samples
    num_reads: npt.NDArray[np.int64]  # ids by table
    counts: npt.NDArray[np.int64]  # of each id of all tables, most first

    @property
    def num_samples(self) -> int:
        """Samples to train on."""
        return sum(map(len, self.train))


def folder_of(data: str, samples: int, seed: int) -> Path:
    """Where a data set is, generated or fetched if need be; in one process, before others read it."""
    source = SOURCES[data]
    if not source.preset:
        folder = CACHE / "pruning" / "movielens"
        if not (folder / "manifest.json").exists():
            prepare(movielens_1m(), folder, "movielens", test_share=0)
        return folder
    folder = CACHE / "pruning" / f"{data}-{samples}-{seed}-{LOGS}"
    if not (folder / "manifest.json").exists():
        generate_folder(
            source.preset, samples, folder, seed=seed, rare_signal=source.rare_signal, test_share=TEST_SHARE
        )
    return folder


@lru_cache(maxsize=1)
def read_log(data: str, samples: int, seed: int) -> Log:
    """Read a data set; a generated one differs from seed to seed, a real one is split by it."""
    source, folder = SOURCES[data], folder_of(data, samples, seed)
    schema = Schema.read(folder / "schema.yaml")
    if not source.preset:
        # The papers split at random: in the order of time people come, rate a hundred movies and are never
        # seen again, which leaves no method much to keep.
        shuffling = {"shuffle_rows": 1 << 21, "seed": seed} if source.is_shuffled else {}
        batches = _batches(SampleStream(folder, schema, source.batch_size, **shuffling))
        batches = batches[: -(-samples // source.batch_size)]
        num_test = max(1, round(MOVIELENS_TEST_SHARE * len(batches)))
        train, test = batches[:-num_test], batches[-num_test:]
    else:
        train = _batches(SampleStream(folder, schema, source.batch_size))
        test = _batches(SampleStream(folder / "test", schema, _TEST_BATCH))
    return Log(schema, train * source.epochs, test, *_count(schema, train))


def _batches(stream: SampleStream) -> list[Batch]:
    batches = [Batch.from_samples(some) for some in stream]
    for batch in batches:
        batch.ids.offsets()
    return batches


def _count(schema: Schema, batches: list[Batch]) -> tuple[npt.NDArray[np.int64], ...]:
    """How many different ids each table has, how many ids in all, and how often each is read."""
    num_rows, num_reads, counts = [], [], []
    for features in schema.tables.values():
        ids = [batch.ids[feature].values().numpy() for batch in batches for feature in features]
        counts.append(np.unique(np.concatenate(ids), return_counts=True)[1])
        num_rows.append(len(counts[-1]))
        num_reads.append(int(counts[-1].sum()))
    return np.array(num_rows), np.array(num_reads), np.sort(np.concatenate(counts))[::-1]
