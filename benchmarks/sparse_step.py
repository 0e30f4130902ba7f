"""A DLRM step on a Criteo-like log: Rowhaul against plain PyTorch.

The peer is what PyTorch users write today: one ``nn.EmbeddingBag(sparse=True)`` per feature on ids
that were indexed beforehand (its indexing costs nothing here), with ``SparseAdam`` or ``Adagrad``
on sparse gradients. Rowhaul gets raw 64-bit keys and finds or creates their rows in the step.

Both train on ``--seen`` batches first, so that most keys are known, and are timed on the next ones.
They run in one process, in the environment that ``rowhaul train`` sets: waiting OpenMP threads sleep
instead of spinning on a core that somebody else could use, and freed memory is kept.

    python benchmarks/sparse_step.py [--batch-sizes 512,2048,8192] [--dim 16]
"""

from __future__ import annotations

from rowhaul import _environment

_environment.set_passive_waiting()  # before PyTorch is imported
_environment.keep_freed_memory()

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from report import console, interleaved_medians, print_machine, print_table
from rowhaul import optim
from rowhaul.data.generate import LogGenerator
from rowhaul.nn import (
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    RowOptimizer,
)
from rowhaul.nn.models import DLRM

warnings.filterwarnings("ignore", "Sparse invariant checks")

WARMUP = 3
PAIRS = {
    "adam": (lambda: optim.Adam(lr=0.001), lambda weights: torch.optim.SparseAdam(weights, lr=0.001)),
    "adagrad": (lambda: optim.Adagrad(lr=0.01), lambda weights: torch.optim.Adagrad(weights, lr=0.01)),
}


class PlainTables(nn.Module):
    """The peer: an EmbeddingBag per feature, in the shape of a collection.

    Ids are cut into features beforehand too, so that only PyTorch's own work is timed.
    """

    def __init__(self, configs: list[EmbeddingBagConfig], log: Log) -> None:
        super().__init__()
        self._configs = configs
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, config.embedding_dim, mode="sum", sparse=True)
            for rows, config in zip(log.num_rows, configs, strict=True)
        )
        self._cut = {
            id(batch.ids): [
                (batch.ids[config.name].values(), batch.ids[config.name].offsets()[:-1]) for config in configs
            ]
            for batch in log.indexed
        }

    def table_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled = [bag(*cut) for bag, cut in zip(self.bags, self._cut[id(features)], strict=True)]
        names, dims = zip(*((c.name, c.embedding_dim) for c in self._configs), strict=True)
        return KeyedTensor(list(names), list(dims), torch.cat(pooled, 1))


@dataclass
class Log:
    """The same batches twice: with raw keys, and with ids indexed beforehand."""

    raw: list[Batch]
    indexed: list[Batch]
    num_rows: list[int]
    facts: str


def read_log(batch_size: int, steps: int) -> Log:
    generator = LogGenerator("criteo", rows=batch_size * steps)
    table = pa.Table.from_batches(generator.batches())
    names = [column.name for column in generator.schema.ids]
    keys, indexed, num_rows = [], [], []
    for name in names:
        column = table[name].combine_chunks()
        valid = ~column.is_null().to_numpy(zero_copy_only=False)
        values = column.fill_null(0).to_numpy()
        known, positions = np.unique(values[valid], return_inverse=True)
        index = np.zeros(len(values), dtype=np.int64)
        index[valid] = positions
        keys.append((values, valid))
        indexed.append((index, valid))
        num_rows.append(len(known))
    dense = np.stack([table[c.name].fill_null(0).to_numpy() for c in generator.schema.dense], 1)
    dense = np.log1p(np.maximum(dense, 0)).astype(np.float32)
    labels = table[generator.schema.label.name].to_numpy().astype(np.float32)

    def batches(columns: list[tuple[np.ndarray, np.ndarray]]) -> list[Batch]:
        made = []
        for first in range(0, len(labels), batch_size):
            rows = slice(first, first + batch_size)
            values = np.concatenate([value[rows][valid[rows]] for value, valid in columns])
            lengths = np.concatenate([valid[rows] for _, valid in columns]).astype(np.int64)
            ids = KeyedJaggedTensor(names, torch.from_numpy(values), lengths=torch.from_numpy(lengths))
            ids.offsets()
            tensors = torch.from_numpy(dense[rows]), ids, torch.from_numpy(labels[rows])
            made.append(Batch(*tensors, torch.arange(first, first + batch_size), batch_size))
        return made

    raw = batches(keys)
    last = sum(len(np.unique(raw[-1].ids[name].values())) for name in names)
    num_ids = len(raw[-1].ids.values())
    facts = f"{sum(num_rows):,} rows in all, {last:,} distinct rows in a batch of {num_ids:,} ids"
    return Log(raw, batches(indexed), num_rows, facts)


def measure(name: str, log: Log, dim: int, seen: int) -> dict[str, float]:
    """Median seconds of the sparse part alone and of the whole step, for both."""
    make_rule, make_peer = PAIRS[name]
    features = log.raw[0].ids.keys()
    configs = [EmbeddingBagConfig(embedding_dim=dim, name=one, feature_names=[one]) for one in features]
    gradient = torch.randn(len(log.raw[0]), dim * len(features)) / len(log.raw[0])
    runs: dict[str, Callable[[int], None]] = {}
    for part in ("sparse", "whole"):
        ours, plain = (
            EmbeddingBagCollection(configs, optimizer=make_rule()),
            PlainTables(configs, log),
        )
        sides = {
            "rowhaul": (ours, RowOptimizer(ours), log.raw),
            "pytorch": (plain, make_peer(list(plain.parameters())), log.indexed),
        }
        for side, (tables, optimizer, batches) in sides.items():
            sparse = partial(sparse_step, tables, optimizer, gradient)
            for batch in batches[:seen]:
                sparse(batch)
            if part == "whole":
                model = DLRM(tables, log.raw[0].dense.shape[1])
                rows = {id(parameter) for parameter in tables.parameters()}
                dense = torch.optim.Adam([p for p in model.parameters() if id(p) not in rows])
                step = partial(whole_step, model, optimizer, dense)
            else:
                step = sparse
            runs[f"{part} {side}"] = lambda repeat, step=step, batches=batches: step(batches[seen + repeat])
    return interleaved_medians(runs, len(log.raw) - seen - WARMUP, WARMUP)


def sparse_step(tables: nn.Module, optimizer: torch.optim.Optimizer, gradient: Tensor, batch: Batch) -> None:
    tables(batch.ids).values().backward(gradient)
    optimizer.step()
    optimizer.zero_grad()


def whole_step(
    model: nn.Module, rows: torch.optim.Optimizer, dense: torch.optim.Optimizer, batch: Batch
) -> None:
    per_sample = binary_cross_entropy_with_logits(model(batch), batch.labels, reduction="none")
    batch.loss(per_sample).backward()
    for optimizer in (rows, dense):
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-sizes", default="512,2048,8192")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--seen", type=int, default=400_000, help="samples trained on before timing")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=0, help="PyTorch threads; default PyTorch's choice")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print_machine()
    console.print(f"dim {options.dim}, 26 features, {torch.get_num_threads()} PyTorch threads, float32")
    lines = []
    for batch_size in map(int, options.batch_sizes.split(",")):
        seen = options.seen // batch_size
        log = read_log(batch_size, seen + WARMUP + options.steps)
        console.print(f"batch {batch_size:,}: {log.facts}")
        for name in PAIRS:
            seconds = measure(name, log, options.dim, seen)
            ms = {key: 1e3 * value for key, value in seconds.items()}
            for part in ("sparse", "whole"):
                peer, ours = ms[f"{part} pytorch"], ms[f"{part} rowhaul"]
                lines.append([f"{batch_size:,}, {name}, {part}", peer, ours, f"{peer / ours:.2f}x"])
            shares = [f"{ms[f'sparse {side}'] / ms[f'whole {side}']:.0%}" for side in ("pytorch", "rowhaul")]
            lines.append([f"{batch_size:,}, {name}, share of the sparse part", *shares, ""])
    print_table(
        "milliseconds a step, medians", ["batch, optimizer, part", "PyTorch", "Rowhaul", "speed-up"], lines
    )


if __name__ == "__main__":
    main()
