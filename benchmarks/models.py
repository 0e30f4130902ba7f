"""Every model beside the same model over plain PyTorch tables: what they learn, how fast, and what moves.

The peer is the very same module over `torch.nn.EmbeddingBag` or, for models of histories,
`torch.nn.Embedding` (sparse gradients, `torch.optim.Adagrad`; `torch.optim.Adam` for the dense part; no
kernel of this library) with the same batches, seeds and epochs. Its ids are numbered before anything is
timed, since PyTorch's tables take numbers and Rowhaul takes keys. Rowhaul steps the dense part by PyTorch's
`Adam(fused=True)`, as `rowhaul train` does; the peer by its default, or with ``--fused-peer`` by the same.
Both train by turns; speeds are of processor time, on one thread.

    python benchmarks/models.py                                  # all, 3 seeds
    python benchmarks/models.py --fused-peer                     # the peer asks for the faster Adam
    python benchmarks/models.py --logs criteo --models dcnv2 --seeds 1 --rows 50_000
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datasets import movielens_1m
from report import console, print_machine, print_table
from rowhaul.data.generate.folder import generate_folder
from rowhaul.data.preparing import prepare
from rowhaul.data.samples import Samples
from rowhaul.data.schema import IdColumn, LabelColumn, Schema
from rowhaul.data.stream import SampleStream
from rowhaul.nn.models import MODELS, MultiTaskModel
from zoo.sides import Measured, candidates, measure

BATCH_SIZE, HISTORY = 1024, 50
POOLED = tuple(
    name
    for name, kind in MODELS.items()
    if kind.is_pooled and kind.least_tasks == 1 and not issubclass(kind, MultiTaskModel)
)
SEVERAL = tuple(name for name, kind in MODELS.items() if kind.most_tasks != 1)


def next_item(schema: Schema) -> Schema:
    """The movie after a history, against others."""
    movie = IdColumn("movie", type="integer")
    history = IdColumn("history", "movie", "integer", max_length=HISTORY)
    others = IdColumn("others", "movie", "integer", negatives_of="movie")
    return Schema(LabelColumn("liked"), (), (movie, history, others))


def without_histories(schema: Schema) -> Schema:
    """All columns but lists of events."""
    return Schema(schema.label, schema.dense, tuple(one for one in schema.ids if one.max_length is None))


@dataclass(frozen=True)
class Log:
    """What is trained on: how it is made, which columns are read, by which models."""

    source: str  # of `SOURCES`
    models: tuple[str, ...]
    columns: Callable[[Schema], Schema] = lambda schema: schema
    ranks: bool = False  # whether quality is NDCG@10 of the next item among others, and not AUC


SOURCES: dict[str, Callable[[Path, int], object]] = {
    "criteo": lambda folder, rows: generate_folder("criteo", round(rows / 0.9), folder),
    "conversions": lambda folder, rows: generate_folder(
        "movielens", round(rows / 0.9), folder, conversions=True
    ),
    "movielens-1m": lambda folder, rows: prepare(movielens_1m(), folder, "movielens", history=HISTORY),
}
LOGS = {
    "criteo": Log("criteo", POOLED),
    "next-item": Log("movielens-1m", ("sasrec", "two_tower"), next_item, ranks=True),
    "histories": Log("movielens-1m", ("din",)),
    "conversions": Log("conversions", SEVERAL),
    "movielens-1m": Log("movielens-1m", POOLED, without_histories),
}


def samples_of(log: Log, folder: Path, seed: int, arguments: Any) -> tuple[list[Samples], list[Samples]]:
    """Batches to train on, and to test on."""
    schema = log.columns(Schema.read(folder / "schema.yaml"))
    train = SampleStream(
        folder,
        schema,
        BATCH_SIZE,
        epochs=arguments.epochs,
        shuffle_rows=65_536,
        seed=seed,
        limit=arguments.rows * arguments.epochs,
    )
    test = SampleStream(folder / "test", schema, BATCH_SIZE, limit=arguments.rows)
    if not log.ranks:
        return list(train), list(test)
    batches = [_all_liked(one) for one in train]
    movies = np.unique(
        np.concatenate([one.ids_of_features()[one.features.index("movie")] for one in batches])
    )
    return batches, [candidates(_all_liked(one), movies, 40, 0) for one in islice(test, 10)]


def _all_liked(samples: Samples) -> Samples:
    """The movie that came next is the one to find, however many stars it got."""
    return replace(samples, labels=np.ones(len(samples), np.float32))


def ids_and_rows(schema: Schema, batches: Sequence[Samples]) -> tuple[int, int]:
    """Ids that batches read, and the distinct rows of each, which are all that moves."""
    table_of = {column.name: column.table for column in schema.ids}
    distinct = 0
    for samples in batches:
        by_table: dict[str, list[Any]] = {}
        for feature, ids in zip(samples.features, samples.ids_of_features(), strict=True):
            by_table.setdefault(table_of[feature], []).append(ids)
        distinct += sum(len(np.unique(np.concatenate(parts))) for parts in by_table.values())
    return sum(len(one.values) for one in batches), distinct


def lines(log: Log, folder: Path, names: Sequence[str], arguments: Any) -> Iterator[list[object]]:
    """Yield a line for each model."""
    schema = log.columns(Schema.read(folder / "schema.yaml"))
    every = [samples_of(log, folder, seed, arguments) for seed in range(arguments.seeds)]
    read, distinct = ids_and_rows(schema, every[0][0][:20])
    for name in names:
        found = [
            measure(name, schema, train, test, seed, ranks=log.ranks, fused_peer=arguments.fused_peer)
            for seed, (train, test) in enumerate(every)
        ]
        yield [name, *_numbers(found), f"{distinct / read:.1%}"]


def _numbers(found: Sequence[Measured]) -> Iterator[object]:
    for side in (0, 1):
        qualities = [one.quality[side] for one in found]
        yield f"{statistics.mean(qualities):.4f} ± {np.std(qualities):.4f}"
    for side in (0, 1):
        yield statistics.median(one.rate[side] for one in found)
    yield f"{statistics.median(one.rate[0] / one.rate[1] for one in found):.2f}x"
    yield f"{statistics.median(one.limit for one in found):.2f}x"
    yield f"{statistics.median(one.sparse[1] / one.sparse[0] for one in found):.2f}x"


def main() -> None:
    """Print a table for each log."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--logs", nargs="+", choices=LOGS, default=list(LOGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rows", type=int, default=100_000, help="to train on in an epoch, and to test on")
    parser.add_argument("--fused-peer", action="store_true", help="the peer asks for Adam(fused=True), too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print_machine("scikit-learn")
    console.print("One thread; samples a second of processor time. Sparse part: reading and stepping rows.")
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.logs:
            log = LOGS[name]
            names = [one for one in log.models if one in arguments.models.split(",")]
            if not names:
                continue
            folder = Path(temporary) / log.source
            if not folder.exists():
                SOURCES[log.source](folder, arguments.rows)
            quality = "NDCG@10" if log.ranks else "AUC"
            much = f"{arguments.epochs} epoch(s) of at most {arguments.rows:,} samples"
            print_table(
                f"{name}, {arguments.seeds} seed(s), {much}",
                [
                    *("", quality, "PyTorch", "samples/s", "PyTorch", "ratio", "at most"),
                    *("sparse part", "rows / ids"),
                ],
                list(lines(log, folder, names, arguments)),
            )


if __name__ == "__main__":
    main()
