"""The sparse part of a step, pruned against unpruned: rows beyond the caches, K = 2, 4, 8 chunks a row.

Tables are filled with all their rows first, which is more than the caches hold, and trained on skewed
batches until pruning has found the useful ones. What is timed is reading the rows of a batch, the way back of
its gradients and the row optimizer's step; the sides take turns in one process. Utilities are brought up to
date beside the next forward, so wall time and CPU time of all threads are both shown. The pruning itself
comes every 1,000 steps by default; its share of a step is shown at that rate.

    python benchmarks/prune_step.py [--ratio 0.99] [--dim 32] [--rows 4000000] [--batch-size 2048]
"""

from __future__ import annotations

from rowhaul import _environment

_environment.let_waiting_threads_sleep()  # before PyTorch is imported
_environment.keep_freed_memory()

import argparse
import statistics
import time

import numpy as np
import torch

from report import console, print_machine, print_table
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, RowOptimizer
from rowhaul.optim import row_optimizer
from rowhaul.store.pruning import PruneSettings

PERIOD = 1000  # the default number of steps between prunings
MIX = 0x9E3779B97F4A7C15


class Side:
    """A collection and its optimizer, stepped with gradients that are given."""

    def __init__(self, name: str, options: argparse.Namespace, pruning: PruneSettings | None) -> None:
        self.name = name
        features = [f"f{t}" for t in range(options.tables)]
        configs = [
            EmbeddingBagConfig(embedding_dim=options.dim, name=one, feature_names=[one]) for one in features
        ]
        rule = row_optimizer(options.optimizer, lr=0.02)
        self.collection = EmbeddingBagCollection(configs, optimizer=rule, pruning=pruning)
        self.rows = RowOptimizer(self.collection)
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def step(self, ids: KeyedJaggedTensor, gradient: torch.Tensor) -> None:
        pooled = self.collection(ids).values()
        pooled.backward(gradient[: len(pooled)])
        self.rows.step()

    def timed_step(self, ids: KeyedJaggedTensor, gradient: torch.Tensor) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.step(ids, gradient)
        self.wall.append(time.perf_counter() - wall)
        if self.collection.pruning:
            self.collection.pruning.wait()  # its CPU time counts here, not on the other side
        self.cpu.append(time.process_time() - cpu)


def batch_of(keys: np.ndarray, features: list[str]) -> KeyedJaggedTensor:
    """Keys, features x samples, as they come from a file: one id a bag."""
    mixed = (keys.astype(np.uint64) * np.uint64(MIX)).view(np.int64)
    lengths = torch.ones(keys.size, dtype=torch.int64)
    ids = KeyedJaggedTensor(features, torch.from_numpy(mixed.reshape(-1)), lengths=lengths)
    ids.offsets()
    return ids


def skewed(random: np.random.Generator, shape: tuple[int, int], num_rows: int, skew: float) -> np.ndarray:
    """Row numbers by a power law: most reads go to few rows, the rest to all others."""
    uniform = random.random(shape)
    if abs(skew - 1) < 1e-9:
        return np.minimum(num_rows**uniform, num_rows - 1).astype(np.int64)
    top = num_rows ** (1 - skew)
    return np.minimum((uniform * (top - 1) + 1) ** (1 / (1 - skew)), num_rows - 1).astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratio", type=float, default=0.99)
    parser.add_argument("--chunks", default="2,4,8")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=4_000_000, help="of all tables together")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--skew", type=float, default=0.8, help="exponent of the power law of reads")
    parser.add_argument("--optimizer", default="rowwise_adagrad")
    parser.add_argument("--warm", type=int, default=60, help="steps before timing, pruned every 20")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print_machine()
    sides = [Side("unpruned", options, None)]
    for chunks in map(int, options.chunks.split(",")):
        pruning = PruneSettings(ratio=options.ratio, chunks=chunks, period=20)
        sides.append(Side(f"K = {chunks}", options, pruning))
    random = np.random.default_rng(0)
    features = [f"f{t}" for t in range(options.tables)]
    per_table = options.rows // options.tables
    slice_size = 16_384
    gradient = torch.randn(slice_size, options.dim * options.tables) * 1e-3
    for first in range(0, per_table, slice_size):
        keys = np.tile(np.arange(first, min(first + slice_size, per_table)), (options.tables, 1))
        for side in sides:
            side.step(batch_of(keys, features), gradient)
    shape = (options.tables, options.batch_size)
    for _ in range(options.warm):
        ids = batch_of(skewed(random, shape, per_table, options.skew), features)
        for side in sides:
            side.step(ids, gradient)
    pruning_seconds = {side.name: prune_now(side) for side in sides[1:]}
    for _ in range(options.warm):  # until the index is as full as it gets between two prunings
        ids = batch_of(skewed(random, shape, per_table, options.skew), features)
        for side in sides:
            side.step(ids, gradient)
    distinct = []
    for _ in range(options.steps):
        keys = skewed(random, shape, per_table, options.skew)
        distinct.append(sum(len(np.unique(some)) for some in keys))
        ids = batch_of(keys, features)
        for side in sides:
            side.timed_step(ids, gradient)
    console.print(
        f"{options.rows:,} rows of {options.dim} in {options.tables} tables, {options.optimizer}, "
        f"{options.batch_size:,} samples a batch ({int(np.median(distinct)):,} distinct rows), "
        f"{torch.get_num_threads()} threads, {options.ratio:.1%} pruned"
    )
    print_sides(sides, pruning_seconds)


def prune_now(side: Side) -> tuple[float, float]:
    """Seconds of one pruning, by the clock and of CPU time; afterwards none comes."""
    assert side.collection.pruning is not None
    side.collection.pruning.wait()
    began, began_cpu = time.perf_counter(), time.process_time()
    for pruner in side.collection.pruning.pruners:
        pruner.prune()
        object.__setattr__(pruner.settings, "period", 1 << 40)
    return time.perf_counter() - began, time.process_time() - began_cpu


def print_sides(sides: list[Side], pruning_seconds: dict[str, tuple[float, float]]) -> None:
    plain_wall, plain_cpu = (statistics.median(one) for one in (sides[0].wall, sides[0].cpu))
    lines = []
    for side in sides:
        wall, cpu = statistics.median(side.wall), statistics.median(side.cpu)
        pruning, pruning_cpu = (one / PERIOD for one in pruning_seconds.get(side.name, (0.0, 0.0)))
        held = side.collection.allocated_bytes
        lines.append(
            [
                side.name,
                1e3 * wall,
                1e3 * cpu,
                1e3 * pruning_cpu,
                f"{plain_wall / (wall + pruning):.2f}x",
                f"{plain_cpu / (cpu + pruning_cpu):.2f}x",
                f"{held / 2**20:,.0f}",
                f"{held / sides[0].collection.allocated_bytes:.1%}",
            ]
        )
    print_table(
        "milliseconds a step, medians",
        ["rows", "wall", "CPU", "pruning", "speed-up", "by CPU", "MiB held", "of unpruned"],
        lines,
    )


if __name__ == "__main__":
    main()
