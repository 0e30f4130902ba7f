"""Rows on a GPU: the sparse step against a copy's bandwidth, a DLRM's whole step against plain PyTorch.

The peer is what one would write without Rowhaul: `nn.Embedding(sparse=True)` over ids that were indexed
beforehand, Adagrad for rows, Adam for the rest, all on the card. Rowhaul is given raw keys. Everything
runs in one process and in turns; medians. Last, four ranks and a store train on the card over loopback: it
shows that they learn what one process there learns, and send the bytes of their plans, and nothing of speed.

    python benchmarks/gpu.py                 # all, a few minutes on one card
    python benchmarks/gpu.py --only step     # or: dlrm, cluster
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from rowhaul.cluster import launch
from rowhaul.data.files import find_schema
from rowhaul.data.samples import Samples
from rowhaul.data.schema import DenseColumn, IdColumn, LabelColumn, Schema
from rowhaul.device.batches import Bags
from rowhaul.device.tables import DeviceTables
from rowhaul.nn import Batch, KeyedTensor
from rowhaul.nn.models import build_model
from rowhaul.optim import RowwiseAdagrad
from rowhaul.runtime.mover import Mover
from rowhaul.runtime.phases import Payloads
from rowhaul.store import TableSpec
from rowhaul.train import ClusterConfig
from rowhaul.train.config import ModelConfig, OptimizerConfig, TrainConfig
from rowhaul.train.distributed.training import layout_of, only_collection
from rowhaul.train.trainer import Trainer, make_model, per_sample_loss
from rowhaul.verify.comparison import compare
from rowhaul.verify.verify import Recorded, train_alone, train_and_record

FEATURES, DENSE = 26, 13
LAYERS = {"bottom": [], "top": [1024, 512]}
CARD = torch.device("cuda")


def timed(run: Callable[[], object], count: int, *, warm: bool = True) -> float:
    """Milliseconds of one call by the card's clock: the median of some."""
    if warm:
        run()
    taken = []
    for _ in range(count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def skewed(random: np.random.Generator, size: int, below: int) -> np.ndarray:
    """Ids whose logarithm is uniform: the first few are read in every batch."""
    return (below ** random.random(size)).astype(np.int64) - 1


def copy_bandwidth() -> float:
    """Bytes a second of copying a GiB on the card, read and written."""
    source = torch.empty(1 << 28, device=CARD)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), 20) * 1e3


def sparse_step(dim: int = 64, num_samples: int = 65_536, num_keys: int = 30_000_000) -> None:
    """Keys to updated rows: find, pool, sum gradients, step."""
    specs = [TableSpec(f"t{number}", dim, -0.1, 0.1) for number in range(FEATURES)]
    tables = DeviceTables(specs, RowwiseAdagrad(0.05), torch.float32, 0, CARD)
    per_table = num_keys // FEATURES
    for table in range(FEATURES):
        for first in range(0, per_table, 1 << 20):
            keys = torch.arange(first, min(first + (1 << 20), per_table), device=CARD) * 7919 + table
            tables.find_or_make(keys, torch.full((len(keys),), table, dtype=torch.int32, device=CARD))
    records = len(tables.index)
    values = records * (dim + 1) * 4
    index = tables.index.allocated_bytes / records
    share = tables.arena.allocated_bytes / values
    print(f"{records:,} rows of {dim}: {share:.2f} of their bytes, and {index:.1f} a key")
    bandwidth = copy_bandwidth()
    print(f"a copy moves {bandwidth / 1e12:.2f} TB/s")
    of_id = torch.arange(FEATURES, device=CARD, dtype=torch.int32).repeat_interleave(num_samples)
    count = FEATURES * num_samples
    columns = torch.arange(FEATURES, device=CARD) * dim
    bags = Bags(
        num_samples, count, None, None, columns, torch.zeros(FEATURES, dtype=torch.int32, device=CARD)
    )
    out = torch.empty((num_samples, FEATURES * dim), device=CARD)
    gradients = torch.randn(out.shape, device=CARD)
    random = np.random.default_rng(0)
    cases = (("even", 0.0), ("skewed", 0.0), ("even", 0.02), ("skewed", 0.02))
    for turn, (name, share_new) in enumerate(cases):
        batches = []
        for _ in range(12):
            ids = random.integers(0, per_table, count) if name == "even" else skewed(random, count, per_table)
            keys = torch.from_numpy(ids).to(CARD) * 7919 + of_id
            chosen = torch.rand(count, device=CARD) < share_new
            keys[chosen] = (
                -1 - torch.arange(int(chosen.sum()), device=CARD) - (len(batches) << 32) - (turn << 40)
            )
            batches.append(keys)
        taken, recorded = _step_times(tables, batches, of_id, bags, out, gradients)
        distinct = len(torch.unique(tables.find(batches[0], of_id)))
        # What must move: rows to vectors, gradients, rows and their state both ways.
        moved = 4 * dim * (2 * count + count + 2 * distinct) + 8 * distinct
        print(
            f"sparse step, {name} ids ({distinct:,} rows), {share_new:.0%} new: {taken:.2f} ms, recorded "
            f"{recorded:.2f} ms ({moved / recorded * 1e3 / bandwidth:.0%} of the copy's bandwidth)"
        )


def _step_times(
    tables: DeviceTables, batches: list[Tensor], of_id: Tensor, bags: Bags, out: Tensor, gradients: Tensor
) -> tuple[float, float]:
    """Milliseconds of a step, started kernel by kernel and recorded; each batch is new to the tables."""

    def step(keys: Tensor, find: Callable[[Tensor, Tensor], Tensor]) -> None:
        found = find(keys, of_id)
        tables.pool(found, bags, None, out)
        tables.step(found, bags, gradients, 0.05, 1)

    half = len(batches) // 2
    turn = iter(batches[:half])
    taken = timed(lambda: step(next(turn), tables.find_or_make), half - 1)
    keys = batches[half].clone()
    tables.has_spare(len(keys) * half)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(keys, tables.find_or_make_within)
    times = []
    for one in batches[half:]:
        keys.copy_(one)
        times.append(timed(graph.replay, 1, warm=False))
        tables.index.ask(len(keys))
    return taken, statistics.median(times)


class IndexedTables(nn.Module):
    """The peer's rows: a table for each feature, as most would write it, or one for all, which is quicker."""

    def __init__(self, names: list[str], num_rows: int, dim: int, num_tables: int) -> None:
        super().__init__()
        self.names, self.dim = names, dim
        per_table = num_rows // num_tables
        self.rows = nn.ModuleList(
            nn.Embedding(per_table, dim, sparse=True, device=CARD) for _ in range(num_tables)
        )

    def forward(self, ids: Tensor) -> KeyedTensor:
        """Vectors of samples x features."""
        if len(self.rows) == 1:
            vectors = self.rows[0](ids).reshape(len(ids), -1)
        else:
            vectors = torch.cat([rows(ids[:, number]) for number, rows in enumerate(self.rows)], dim=1)
        return KeyedTensor(self.names, [self.dim] * len(self.names), vectors)


def dlrm(dim: int, num_samples: int, num_keys: int, tf32: bool) -> None:
    """A whole training step of a DLRM, Rowhaul and plain PyTorch."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    random = np.random.default_rng(0)
    per_table = num_keys // FEATURES
    names = [f"C{number}" for number in range(FEATURES)]
    schema = Schema(
        LabelColumn("label"),
        tuple(DenseColumn(f"I{number}") for number in range(DENSE)),
        tuple(IdColumn(name) for name in names),
    )
    config = TrainConfig(
        model=ModelConfig("dlrm", dim, dict(LAYERS)),
        rows=OptimizerConfig("rowwise_adagrad", 0.05),
        batch_size=num_samples,
        device="cuda",
    )
    trainer = Trainer(config, schema)
    batches = []
    for number in range(8):
        ids = np.stack([skewed(random, num_samples, per_table) for _ in names])
        dense = random.random((num_samples, DENSE)).astype(np.float32)
        labels = (random.random(num_samples) < 0.3).astype(np.float32)
        batches.append((ids, dense, labels, np.arange(num_samples) + number * num_samples))
    prepared = [
        trainer.prepare(
            Samples(
                features=tuple(names), values=(ids * 7919 + 5).reshape(-1),
                lengths=np.ones(ids.shape, np.int32), dense=dense, labels=labels, index=index,
            )
        )
        for ids, dense, labels, index in batches
    ]  # fmt: skip
    runs = {
        "Rowhaul": lambda number: trainer.train_step(prepared[number % 8]),
        "one table": _peer(schema, names, num_keys, dim, 1, prepared, batches),
        "a table each": _peer(schema, names, num_keys, dim, FEATURES, prepared, batches),
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(6):
        for name, run in runs.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for number in range(24):
                run(number)
            torch.cuda.synchronize()
            if turn:
                taken[name].append((time.perf_counter() - began) / 24)
    speeds = {name: num_samples / statistics.median(times) / 1e6 for name, times in taken.items()}
    ours = speeds.pop("Rowhaul")
    peers = ", ".join(
        f"PyTorch ({name}) {speed:.2f} M: {ours / speed:.2f}x" for name, speed in speeds.items()
    )
    what = f"DLRM, dim {dim}, batch {num_samples:,}{', TF32' if tf32 else ''}"
    print(f"{what}: Rowhaul {ours:.2f} M samples/s, {peers}")


def _peer(
    schema: Schema,
    names: list[str],
    num_keys: int,
    dim: int,
    num_tables: int,
    prepared: list[Batch],
    batches: list[tuple[np.ndarray, ...]],
) -> Callable[[int], None]:
    """Return a step of plain PyTorch."""
    model = build_model(
        "dlrm", tables=schema.tables, num_dense=DENSE, embedding_dim=dim,
        make_collection=lambda tables: _Placeholder(tables, IndexedTables(names, num_keys, dim, num_tables)),
        seed=0, options=dict(LAYERS),
    ).to(CARD)  # fmt: skip
    sparse = [one for name, one in model.named_parameters() if ".rows." in name]
    others = [one for name, one in model.named_parameters() if ".rows." not in name]
    optimizers = [torch.optim.Adagrad(sparse, 0.05), torch.optim.Adam(others, 0.001)]
    first = torch.arange(FEATURES, device=CARD) * (num_keys // FEATURES) * (num_tables == 1)
    indexed = [torch.from_numpy(ids.T.copy()).to(CARD) + first for ids, *_ in batches]

    def step(number: int) -> None:
        batch = prepared[number % 8]
        model.collection.ids = indexed[number % 8]
        loss = batch.loss(per_sample_loss(model(batch), batch))
        loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        loss.item()

    return step


class _Placeholder(nn.Module):
    """Stands where a model has its collection: reads the ids that were indexed."""

    def __init__(self, tables: list, rows: IndexedTables) -> None:
        super().__init__()
        self.tables, self.inner, self.ids = tables, rows, torch.empty(0)

    def embedding_bag_configs(self) -> list:
        return self.tables

    def forward(self, features: object) -> KeyedTensor:
        return self.inner(self.ids)


WORKERS, STEPS = 4, 30


def cluster_config() -> TrainConfig:
    """Workers with small caches, so that rows come and go."""
    return TrainConfig(
        model=ModelConfig("dlrm", 16, {"bottom": [], "top": [64, 32]}),
        rows=OptimizerConfig("rowwise_adagrad", 0.05),
        batch_size=1024,
        max_steps=STEPS,
        precision="float64",
        threads=1,
        device="cuda",
        cluster=ClusterConfig(
            workers=WORKERS, dispatcher="joint", cache="12000", hot_rows=50, share_device=True
        ),
    )


def cluster() -> None:
    """Four ranks that share the card, against one process on it: plain, and a replay of the same parts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ["--rows", str(1024 * STEPS), "--test-share", "0", "--out", str(folder / "logs")]
        generate = [sys.executable, "-m", "rowhaul", "generate", *options]
        subprocess.run(generate, check=True, capture_output=True)
        launch([], WORKERS, 1, command=[sys.executable, __file__, "--rank", name])
        config, schema, logs = cluster_config(), find_schema(folder / "logs"), folder / "logs"
        layout = layout_of(only_collection(make_model(config, schema)))
        recorded = Recorded.read(folder, layout)
        plain = compare(layout, recorded.trained, train_alone(config, schema, logs))
        replay = compare(layout, recorded.trained, train_alone(config, schema, logs, recorded.workers))
        sent = sum(json.loads(path.read_text()) for path in folder.glob("sent-*.json"))
    planned = sum(size for kind, size in recorded.num_bytes.items() if kind != "all_reduce")
    apart = max(one.largest for one in plain.kinds.values())
    to_the_bit = "equal to the bit" if replay.is_equal else "DIFFERENT"
    print(
        f"{WORKERS} workers on one card and a store, {STEPS} steps in float64: {apart:.1e} from one process "
        f"on it, {to_the_bit} to its replay; {sent:,} bytes sent, {planned:,} planned, hit ratio "
        f"{recorded.hits / recorded.lookups:.0%}"
    )


def train_rank(folder: Path) -> None:
    """Train as one rank, and write down how many bytes its moves have sent."""
    sent, phase, swap = [0], Mover._phase, Mover.swap

    def counted(self: Mover, out_going: Payloads, coming: Payloads, out: np.ndarray) -> np.ndarray:
        sent[0] += sum(out[part].nbytes for peer, part in out_going.messages.items() if peer != self.rank)
        return swap(self, out_going, coming, out)

    def in_phase(self: Mover, *arguments: object) -> None:  # flushes are not counted
        Mover.swap = counted
        phase(self, *arguments)
        Mover.swap = swap

    Mover._phase = in_phase
    train_and_record(cluster_config(), find_schema(folder / "logs"), folder / "logs", folder)
    (folder / f"sent-{os.environ['RANK']}.json").write_text(json.dumps(sent[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["step", "dlrm", "cluster"])
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        train_rank(arguments.rank)
        return
    chosen = arguments.only
    print(torch.cuda.get_device_name(), torch.__version__)
    if chosen in (None, "step"):
        sparse_step()
        torch.cuda.empty_cache()
    if chosen in (None, "dlrm"):
        for dim, tf32 in ((16, False), (128, True), (128, False)):
            for num_samples in (2048, 16_384, 65_536):
                dlrm(dim, num_samples, 10_000_000 if dim == 128 else 30_000_000, tf32)
                torch.cuda.empty_cache()
    if chosen in (None, "cluster"):
        cluster()


if __name__ == "__main__":
    main()
