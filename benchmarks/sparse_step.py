"""A DLRM step on a Criteo-like log: Rowhaul against plain PyTorch.

The peer is what PyTorch users write today: one ``nn.EmbeddingBag(sparse=True)`` per feature on ids
that were indexed beforehand (its indexing costs nothing here), with ``SparseAdam`` or ``Adagrad``
on sparse gradients. Rowhaul gets raw 64-bit keys and finds or creates their rows in the step.

    python benchmarks/sparse_step.py [--batch-size 2048] [--dim 16] [--steps 40]
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np
import torch
from report import console, interleaved_medians, print_machine, print_table
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from rowhaul import optim
from rowhaul.cli.allocator import keep_freed_memory
from rowhaul.data.generate import LogGenerator
from rowhaul.nn import Batch, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor, RowOptimizer
from rowhaul.nn.models import DLRM

warnings.filterwarnings("ignore", "Sparse invariant checks")

WARMUP = 3
PAIRS = {
    "adam": (lambda: optim.Adam(lr=0.001), lambda weights: torch.optim.SparseAdam(weights, lr=0.001)),
    "adagrad": (lambda: optim.Adagrad(lr=0.01), lambda weights: torch.optim.Adagrad(weights, lr=0.01)),
}


class PlainTables(nn.Module):
    """The peer: an EmbeddingBag per feature, in the shape of a collection."""

    def __init__(self, configs: list[EmbeddingBagConfig], num_rows: list[int]) -> None:
        super().__init__()
        self._configs = configs
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, config.embedding_dim, mode="sum", sparse=True)
            for rows, config in zip(num_rows, configs, strict=True)
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        pooled = [
            bag(features[config.name].values(), features[config.name].offsets()[:-1])
            for bag, config in zip(self.bags, self._configs, strict=True)
        ]
        return KeyedTensor([c.name for c in self._configs], [c.embedding_dim for c in self._configs], torch.cat(pooled, 1))


def read_log(batch_size: int, steps: int) -> tuple[list[Batch], list[Batch], list[int], int]:
    """The same batches twice: with raw keys, and with ids indexed beforehand."""
    generator = LogGenerator("criteo", rows=batch_size * steps)
    table = __import__("pyarrow").Table.from_batches(generator.batches())
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
            made.append(Batch(torch.from_numpy(dense[rows]), ids, torch.from_numpy(labels[rows]),
                              torch.arange(first, first + batch_size), batch_size))  # fmt: skip
        return made

    distinct = [len(np.unique(b.ids[n].values())) for b in batches(keys)[:5] for n in names]
    return batches(keys), batches(indexed), num_rows, sum(distinct) // 5


def measure(name: str, raw: list[Batch], indexed: list[Batch], num_rows: list[int], dim: int) -> dict[str, float]:
    """Median seconds of the sparse part alone and of the whole step, for both."""
    make_rule, make_peer = PAIRS[name]
    features = raw[0].ids.keys()
    configs = [EmbeddingBagConfig(embedding_dim=dim, name=one, feature_names=[one]) for one in features]
    gradient = torch.randn(len(raw[0]), dim * len(features)) / len(raw[0])
    runs = {}
    for whole in (False, True):
        ours, plain = EmbeddingBagCollection(configs, optimizer=make_rule()), PlainTables(configs, num_rows)
        rows, bags = RowOptimizer(ours), make_peer(list(plain.parameters()))
        for side, tables, optimizer, batches in (("rowhaul", ours, rows, raw), ("pytorch", plain, bags, indexed)):
            if not whole:

                def sparse(repeat: int, tables=tables, optimizer=optimizer, batches=batches) -> None:
                    tables(batches[repeat].ids).values().backward(gradient)
                    optimizer.step()
                    optimizer.zero_grad()

                runs[f"sparse {side}"] = sparse
            else:
                model = DLRM(tables, raw[0].dense.shape[1])
                bag_parameters = {id(p) for p in plain.parameters()}
                dense = torch.optim.Adam([p for p in model.parameters() if id(p) not in bag_parameters])

                def step(repeat: int, model=model, dense=dense, optimizer=optimizer, batches=batches) -> None:
                    batch = batches[repeat]
                    logits = model(batch)
                    batch.loss(binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")).backward()
                    optimizer.step()
                    dense.step()
                    optimizer.zero_grad()
                    dense.zero_grad()

                runs[f"whole {side}"] = step
    return interleaved_medians(runs, len(raw) - WARMUP, WARMUP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0, help="PyTorch threads; default PyTorch's choice")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    keep_freed_memory()  # for both: they share the process
    print_machine()
    raw, indexed, num_rows, distinct = read_log(options.batch_size, options.steps)
    console.print(
        f"batch {options.batch_size}, dim {options.dim}, 26 features, {sum(num_rows):,} rows, "
        f"{distinct:,} distinct rows a batch, {torch.get_num_threads()} PyTorch threads, float32"
    )
    lines = []
    for name in PAIRS:
        ms = {key: 1e3 * value for key, value in measure(name, raw, indexed, num_rows, options.dim).items()}
        for part in ("sparse", "whole"):
            peer, ours = ms[f"{part} pytorch"], ms[f"{part} rowhaul"]
            lines.append([f"{name}, {part} step", peer, ours, f"{peer / ours:.2f}x"])
        lines.append([
            f"{name}, sparse share of the step",
            f"{ms['sparse pytorch'] / ms['whole pytorch']:.0%}",
            f"{ms['sparse rowhaul'] / ms['whole rowhaul']:.0%}", "",
        ])  # fmt: skip
    print_table("milliseconds, medians", ["", "PyTorch", "Rowhaul", "speed-up"], lines)


if __name__ == "__main__":
    main()
