"""Rows in fewer bits against float32: memory, the time of a step, and what the model has learned.

Memory is what is allocated for rows, optimizer state and index. Time is the processor's, of the sparse part
of a step in one thread: finding rows, pooling, summing gradients, stepping. All types take turns on the same
batches of a generated Criteo-like log, in one process. With ``--seeds`` DLRM is trained on such a log once
for each seed and type, and the mean difference of AUC from float32 is printed with its 95 % interval.

    python benchmarks/row_precision.py [--dim 32] [--batch-size 2048] [--seeds 10]
"""

from __future__ import annotations

from rowhaul import _environment

_environment.set_passive_waiting()  # before PyTorch is imported
_environment.keep_freed_memory()

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from pruning_methods.tables import Estimate
from report import console, print_machine, print_table
from rowhaul import optim
from rowhaul.data.generate.folder import generate_folder
from rowhaul.data.schema import Schema
from rowhaul.nn import Batch, EmbeddingBagCollection, EmbeddingBagConfig, RowOptimizer, RowPrecision
from rowhaul.store.packing import ROW_DTYPES
from rowhaul.train import TrainConfig
from rowhaul.train.run import train_run
from sparse_step import Log, read_log

WARMUP = 5


def make_collection(log: Log, dim: int, row_dtype: str) -> EmbeddingBagCollection:
    names = log.raw[0].ids.keys()
    tables = [EmbeddingBagConfig(embedding_dim=dim, name=one, feature_names=[one]) for one in names]
    rule = optim.RowwiseAdagrad(lr=0.05)
    return EmbeddingBagCollection(tables, optimizer=rule, row_settings=RowPrecision(row_dtype))


def step(
    collection: EmbeddingBagCollection, rows: RowOptimizer, batch: Batch, gradient: torch.Tensor
) -> float:
    """Take a sparse step; returns the processor's seconds."""
    began = time.process_time()
    collection(batch.ids).values().backward(gradient)
    rows.step()
    return time.process_time() - began


def measure_steps(log: Log, dim: int) -> tuple[dict[str, int], dict[str, float]]:
    """Bytes held at the end, and the median seconds of a step, by type."""
    collections = {one: make_collection(log, dim, one) for one in ROW_DTYPES}
    rows = {one: RowOptimizer(collection) for one, collection in collections.items()}
    width = dim * len(log.raw[0].ids.keys())
    gradient = torch.randn(len(log.raw[0]), width) / len(log.raw[0])
    seconds: dict[str, list[float]] = {one: [] for one in ROW_DTYPES}
    for number, batch in enumerate(log.raw):
        for place in range(len(ROW_DTYPES)):  # another one first each time
            one = ROW_DTYPES[(number + place) % len(ROW_DTYPES)]
            taken = step(collections[one], rows[one], batch, gradient)
            if number >= WARMUP:
                seconds[one].append(taken)
    held = {one: collection.allocated_bytes for one, collection in collections.items()}
    return held, {one: statistics.median(some) for one, some in seconds.items()}


def learned(folder: Path, samples: int, seeds: int, dim: int) -> dict[str, list[float]]:
    """AUC by type, one for each seed."""
    log = folder / "log"
    generate_folder("criteo", samples, log)
    schema = Schema.read(log / "schema.yaml")
    found: dict[str, list[float]] = {one: [] for one in ROW_DTYPES}
    for seed in range(seeds):
        for one in ROW_DTYPES:
            config = TrainConfig.from_dict(
                {"row_dtype": one, "seed": seed, "threads": 1, "model": {"embedding_dim": dim}}
            )
            result = train_run(
                config, schema, str(log / "*.parquet"), eval_data=str(log / "test" / "*.parquet")
            )
            assert result.metrics is not None
            found[one].append(result.metrics.auc)
            console.print(f"seed {seed}, {one}: AUC {result.metrics.auc:.4f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--samples", type=int, default=200_000, help="of the log that --seeds trains on")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print_machine()
    log = read_log(given.batch_size, given.steps)
    console.print(log.facts)
    held, seconds = measure_steps(log, given.dim)
    print_table(
        f"rows of {given.dim} values, row-wise Adagrad",
        ["row_dtype", "MiB", "of float32's", "ms of a sparse step", "of float32's"],
        [
            [
                one,
                f"{held[one] / 2**20:.1f}",
                f"{held[one] / held['float32']:.3f}",
                f"{1e3 * seconds[one]:.2f}",
                f"{seconds[one] / seconds['float32']:.2f}",
            ]
            for one in ROW_DTYPES
        ],
    )
    if given.seeds:
        with tempfile.TemporaryDirectory() as folder:
            auc = learned(Path(folder), given.samples, given.seeds, given.dim)
        apart = {
            one: [mine - theirs for mine, theirs in zip(auc[one], auc["float32"], strict=True)] for one in auc
        }
        print_table(
            f"AUC after {given.samples:,} samples, {given.seeds} seeds; points, with the 95 % interval",
            ["row_dtype", "mean AUC", "against float32", "loses at most"],
            [[one, f"{statistics.fmean(auc[one]):.4f}", *_bounds(apart[one])] for one in auc],
        )


def _bounds(apart: list[float]) -> tuple[str, str]:
    """Write a mean difference with its interval, and the loss at the far end of it."""
    found = Estimate.of(apart)
    return found.points(), f"{100 * max(0.0, found.half - found.mean):.3f}"


if __name__ == "__main__":
    main()
