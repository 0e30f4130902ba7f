"""The sparse part of a step, pruned against unpruned: rows beyond the caches, K = 2, 4, 8 chunks a row.

Also within a memory budget, as `rowhaul train --memory-budget` holds rows, of as many bytes as the ratio
leaves of whole rows with their index: in float32 and in int8 (``--chunks none`` for these alone).

Ids are those of the Criteo-like log, as in `sparse_step.py`, or with ``--skew`` drawn by one power law from
equal tables. Tables are filled with all their rows first, more than a gigabyte unpruned, and trained until
pruning has found the useful ones and the index is as full as it gets between two prunings. What is timed is
reading the rows of a batch, the way back of its gradients and the row optimizer's step, on the same batches;
the sides take turns in one process.

Rows can be looked up in the thread that loads batches: ``CPU`` counts that, ``thread`` is what is left for
the training thread. The pruning itself comes every 1,000 steps by default, a stop of a budget every 200; its
share at that rate is in all speed-ups.

    python benchmarks/prune_step.py [--ratio 0.99] [--chunks 2,4] [--skew 0.8] [--dim 32] [--rows 10000000]
"""

from __future__ import annotations

from rowhaul import _environment

_environment.set_passive_waiting()  # before PyTorch is imported
_environment.keep_freed_memory()

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from prune_ids import Ids, by_power_law, criteo_like
from report import console, print_machine, print_table
from rowhaul.budget import BudgetSettings
from rowhaul.budget.maps import record_bytes
from rowhaul.budget.rows import BudgetedRows
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, RowOptimizer
from rowhaul.optim import row_optimizer
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.pool.collection import PrunedRows
from rowhaul.store.footprint import index_bytes
from rowhaul.store.packing import PLAIN

PERIOD = 1000  # the default number of steps between prunings
AHEAD = 3  # batches between the look-up of a batch and its step, where it is early
FILLED = 16_384  # rows of a table that are made at a time
MOST_WARM_STEPS = 600


class Side:
    """A collection and its optimizer, stepped with gradients that are given."""

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        ids: Ids,
        pruning: PruneSettings | BudgetSettings | None,
    ) -> None:
        self.name = name
        configs = [
            EmbeddingBagConfig(embedding_dim=options.dim, name=one, feature_names=[one])
            for one in ids.features
        ]
        rule = row_optimizer(options.optimizer, lr=0.02)
        self.collection = EmbeddingBagCollection(configs, optimizer=rule, pruning=pruning)
        self.rows = RowOptimizer(self.collection)
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.thread: list[float] = []  # CPU time of the training thread, rows looked up early
        self.pruning_seconds = 0.0

    @property
    def is_full(self) -> bool:
        """Whether the index has room for hardly any new row."""
        pruning = self.collection.source
        return not isinstance(pruning, PrunedRows) or all(
            one.map.num_entries >= 0.99 * one.map.room.num_entries for one in pruning.tables
        )

    def step(self, ids: KeyedJaggedTensor, gradient: torch.Tensor) -> None:
        pooled = self.collection(ids).values()
        pooled.backward(gradient[: len(pooled)])
        self.rows.step()

    def timed_step(self, ids: KeyedJaggedTensor, gradient: torch.Tensor) -> None:
        """All of it: what other threads do counts here, not on the other side."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.step(ids, gradient)
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def timed_training(self, ids: KeyedJaggedTensor, gradient: torch.Tensor) -> None:
        """What the training thread does, of a batch that was looked up before."""
        began = time.thread_time()
        self.step(ids, gradient)
        self.thread.append(time.thread_time() - began)

    def prune(self) -> None:
        """Prune now, and not again; of a budget, decide once who has rows, at its usual pace afterwards."""
        source, began = self.collection.source, time.process_time()
        if isinstance(source, BudgetedRows):
            stop = source.settings.next_stop(self.rows.param_groups[0]["number"])
            for slots in source.tables:
                slots.change(stop)
            self.pruning_seconds = (time.process_time() - began) * PERIOD / source.settings.period
            return
        assert isinstance(source, PrunedRows)
        for tables in source.tables:
            tables.prune()
            object.__setattr__(tables.settings, "period", 1 << 40)
        self.pruning_seconds = time.process_time() - began


def fill_and_warm(sides: Sequence[Side], ids: Ids, gradient: torch.Tensor, steps: int) -> None:
    """All rows, some training with prunings, and more without until the index is full."""
    for batch in ids.everything(FILLED):
        for side in sides:
            side.step(batch, gradient)
    for _ in range(steps):
        batch = next(ids.batches)
        for side in sides:
            side.step(batch, gradient)
    for side in sides[1:]:
        side.prune()
    for number in range(MOST_WARM_STEPS):
        if number >= steps and all(side.is_full for side in sides):
            return
        batch = next(ids.batches)
        for side in sides:
            side.step(batch, gradient)
    console.print(f"the index is not full after {MOST_WARM_STEPS} steps: new rows cost time in those timed")


def measure(sides: Sequence[Side], ids: Ids, gradient: torch.Tensor, steps: int) -> list[int]:
    """Time steps, in turns whole ones and those of rows looked up early; distinct rows of each batch."""
    coming = [next(ids.batches) for _ in range(2 * steps)]
    for number, batch in enumerate(coming):
        later = number + AHEAD
        for side in sides:
            if later < len(coming) and later % 2:
                side.collection.locate_early(coming[later])
            if number % 2:
                side.timed_training(batch, gradient)
            else:
                side.timed_step(batch, gradient)
    return [sum(len(np.unique(batch[one].values())) for one in ids.features) for batch in coming]


def print_sides(sides: Sequence[Side]) -> None:
    plain = sides[0]
    lines = []
    for side in sides:
        pruning = side.pruning_seconds / PERIOD
        held = side.collection.allocated_bytes
        lines.append(
            [
                side.name,
                *(1e3 * statistics.median(times) for times in (side.wall, side.cpu, side.thread)),
                1e3 * pruning,
                f"{ratio(plain.wall, side.wall, pruning):.2f}x",
                f"{ratio(plain.cpu, side.cpu, pruning):.2f}x",
                f"{ratio(plain.thread, side.thread, pruning):.2f}x",
                f"{held / 2**20:,.0f}",
                f"{held / plain.collection.allocated_bytes:.1%}",
            ]
        )
    print_table(
        "milliseconds a step, medians; speed-ups are medians over steps, by",
        ["rows", "wall", "CPU", "thread", "pruning", "wall", "CPU", "thread", "MiB held", "of unpruned"],
        lines,
    )


def ratio(plain: Sequence[float], pruned: Sequence[float], pruning: float) -> float:
    """How many times faster: the median over steps that were taken one after the other."""
    return statistics.median(one / (other + pruning) for one, other in zip(plain, pruned, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratio", type=float, default=0.99)
    parser.add_argument("--chunks", default="2,4,8", help="of a row, or none: budgets alone")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--rows", type=int, default=10_000_000, help="of all tables together")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--skew", type=float, default=0.0, help="exponent of a power law instead of the log")
    parser.add_argument("--utility", default="access")
    parser.add_argument("--optimizer", default="rowwise_adagrad")
    parser.add_argument("--warm", type=int, default=60, help="steps before timing, pruned every 20")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="that share the work on tables")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print_machine()
    if options.skew:
        ids = by_power_law(options.rows, options.batch_size, 26, options.skew)
    else:
        ids = criteo_like(options.rows, options.batch_size)
    sides = [Side("unpruned", options, ids, None)]
    for chunks in [] if options.chunks == "none" else options.chunks.split(","):
        pruning = PruneSettings(ratio=options.ratio, chunks=int(chunks), period=20, utility=options.utility)
        sides.append(Side(f"K = {chunks}", options, ids, pruning))
    rule = row_optimizer(options.optimizer, lr=0.02)
    whole = options.rows * record_bytes(options.dim, rule, "float32", PLAIN) + index_bytes(options.rows)
    for held_in in (PLAIN, "int8"):
        budget = BudgetSettings(round((1 - options.ratio) * whole), row_dtype=held_in)
        sides.append(Side(f"budget, {held_in}", options, ids, budget))
    gradient = torch.randn(FILLED, options.dim * len(ids.features)) * 1e-3
    fill_and_warm(sides, ids, gradient, options.warm)
    distinct = measure(sides, ids, gradient, options.steps)
    law = f"power law {options.skew}" if options.skew else "Criteo-like log"
    console.print(
        f"{law}, {options.rows:,} rows of {options.dim} in {len(ids.features)} tables, {options.optimizer}, "
        f"{options.batch_size:,} samples a batch ({int(np.median(distinct)):,} distinct rows), "
        f"threads: {torch.get_num_threads()}, {options.ratio:.1%} pruned"
    )
    print_sides(sides)


if __name__ == "__main__":
    main()
