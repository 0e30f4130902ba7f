"""What it costs to check that nothing is silently wrong, as a share of a training step.

Two checks run beside training on a cluster: every worker hashes its copies of the dense weights, their
optimizer's state and some replicated rows every ``compare_every`` iterations, and every gradient is checked
to be finite before a step uses it. Both are timed here against the compute of one step in one process; on a
cluster an iteration takes longer, by the moves and sums it waits for, so its share is smaller.

    python benchmarks/digests.py [--batch-size 2048] [--steps 30]
"""

from __future__ import annotations

from rowhaul import _environment

_environment.set_passive_waiting()  # before PyTorch is imported
_environment.keep_freed_memory()

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from report import print_machine, print_table
from rowhaul.data.generate.folder import generate_folder
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.nn import Batch
from rowhaul.schedule import HotRows
from rowhaul.train.config import ModelConfig, OptimizerConfig, TrainConfig
from rowhaul.train.distributed.replicas import COMPARE_EVERY, Replicas
from rowhaul.train.distributed.tables import layout_of
from rowhaul.train.finite import check_step
from rowhaul.train.trainer import Trainer

SIZES = {"small": [64, 32], "default": [512, 256], "large": [2048, 1024, 512]}  # layers of DLRM's top
NUM_HOT = 10_000


def main() -> None:
    """Time both checks for models of several sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print_machine()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        generate_folder("criteo", given.batch_size * (given.steps + 10), Path(folder))
        for name, top in SIZES.items():
            rows.append(measure(name, top, Path(folder), given.batch_size, given.steps))
    print_table(
        f"a step of DLRM on {given.batch_size:,} samples, one thread; digests every {COMPARE_EVERY} steps",
        ["top layers", "dense values", "step ms", "digests ms", "a step's share", "finite ms", "share"],
        rows,
    )


def measure(name: str, top: list[int], folder: Path, batch_size: int, steps: int) -> list[object]:
    """One line of the table."""
    schema = Schema.read(folder / "schema.yaml")
    config = TrainConfig(
        model=ModelConfig("dlrm", 16, {"top": top}),
        dense=OptimizerConfig("Adam", 0.001),
        batch_size=batch_size,
    )
    trainer = Trainer(config, schema)
    stream = SampleStream(folder, schema, batch_size)
    batches = [Batch.from_samples(samples) for samples in itertools.islice(stream, steps + 5)]
    for batch in batches[:5]:
        trainer.train_step(batch)
    step = statistics.median(seconds(lambda batch=batch: trainer.train_step(batch)) for batch in batches[5:])

    layout, collection = layout_of(trainer.collection), trainer.collection
    cache = layout.make_cache(collection.feature_groups)
    hot = HotRows(np.zeros(NUM_HOT, np.int32), np.arange(NUM_HOT))
    cache.make(hot.tables, hot.keys)
    replicas = Replicas(trainer.model, cache, trainer.dense)

    def digest() -> None:
        replicas.hash_rows(COMPARE_EVERY, hot)
        replicas.in_passing(COMPARE_EVERY)

    digests = statistics.median(seconds(digest) for _ in range(steps))
    checks = statistics.median(check_seconds(trainer, batches[0]) for _ in range(steps))
    values = sum(one.numel() for one in trainer.model.parameters())
    return [
        f"{name} {top}", f"{values:,}", 1e3 * step, 1e3 * digests, f"{digests / COMPARE_EVERY / step:.3%}",
        1e3 * checks, f"{checks / step:.2%}",
    ]  # fmt: skip


def check_seconds(trainer: Trainer, batch: Batch) -> float:
    """Time the check of one step's gradients, all of which are finite."""
    loss = batch.loss(trainer.model(batch))
    loss.backward()
    source, parameters = trainer.collection.source, list(trainer.model.parameters())
    taken = seconds(lambda: check_step(1, trainer.model, parameters, [batch], loss, source.gradients()))
    trainer.rows.zero_grad()
    trainer.dense.zero_grad()
    return taken


def seconds(call: Callable[[], object]) -> float:
    """Time one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
