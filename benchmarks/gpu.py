"""Rows on a GPU: the sparse step against a copy's bandwidth, a DLRM's whole step against plain PyTorch, and
tables larger than the card's cache against all rows on the card.

The peer is what one would write without Rowhaul: `nn.Embedding(sparse=True)` over ids that were indexed
beforehand, Adagrad for rows, Adam for the rest, all on the card. Rowhaul is given raw keys. Everything
runs in one process and in turns; medians. Last, four ranks share the card, which shows that they learn what
one process there learns.

    python benchmarks/gpu.py                 # all, a few minutes on one card
    python benchmarks/gpu.py --only step     # or: dlrm, cache, cluster
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from on_card.cluster import share_card
from on_card.logs import (
    DENSE,
    FEATURES,
    LAYERS,
    Log,
    criteo_schema,
    dlrm_config,
    keys_of,
    samples_of,
    skewed,
)
from rowhaul._environment import keep_freed_memory, switch_threads_sooner
from rowhaul.data.prefetch import prefetch
from rowhaul.data.schema import Schema
from rowhaul.device.batches import Bags
from rowhaul.device.cache_counts import CacheCounts
from rowhaul.device.cache_size import CacheSize
from rowhaul.device.cached_rows import CachedDeviceRows
from rowhaul.device.rows import DeviceRows
from rowhaul.device.tables import DeviceTables
from rowhaul.nn import Batch, KeyedTensor
from rowhaul.nn.local_rows import LocalRows
from rowhaul.nn.models import build_model
from rowhaul.optim import RowwiseAdagrad
from rowhaul.store import TableSpec
from rowhaul.train.trainer import Trainer, per_sample_loss
from zoo.plain_tables import use_plain_operations

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
    names, schema = criteo_schema()
    trainer = Trainer(dlrm_config(dim, num_samples), schema)
    batches = [np.stack([skewed(random, num_samples, per_table) for _ in names]) for _ in range(8)]
    prepared = [trainer.prepare(samples_of(random, names, ids, number)) for number, ids in enumerate(batches)]
    runs = {"Rowhaul": lambda number: trainer.train_step(prepared[number % 8])}
    if not tf32:  # its products are made of three in TF32; and without that
        plain = Trainer(dlrm_config(dim, num_samples), schema)
        plain.model.top.in_parts = False
        of_plain = [plain.prepare(samples_of(random, names, ids, 0)) for ids in batches]
        runs["Rowhaul, products in float32"] = lambda number: plain.train_step(of_plain[number % 8])
    runs |= {
        "PyTorch, one table": _peer(schema, names, num_keys, dim, 1, prepared, batches),
        "PyTorch, a table each": _peer(schema, names, num_keys, dim, FEATURES, prepared, batches),
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
    peers = ", ".join(f"{name} {speed:.2f} M: {ours / speed:.2f}x" for name, speed in speeds.items())
    what = f"DLRM, dim {dim}, batch {num_samples:,}{', TF32' if tf32 else ''}"
    print(f"{what}: Rowhaul {ours:.2f} M samples/s, {peers}")


def _peer(
    schema: Schema,
    names: list[str],
    num_keys: int,
    dim: int,
    num_tables: int,
    prepared: list[Batch],
    batches: list[np.ndarray],
) -> Callable[[int], None]:
    """Return a step of plain PyTorch."""
    model = build_model(
        "dlrm", tables=schema.tables, num_dense=DENSE, embedding_dim=dim,
        make_collection=lambda tables: _Placeholder(tables, IndexedTables(names, num_keys, dim, num_tables)),
        seed=0, options=dict(LAYERS),
    ).to(CARD)  # fmt: skip
    use_plain_operations(model)
    sparse = [one for name, one in model.named_parameters() if ".rows." in name]
    others = [one for name, one in model.named_parameters() if ".rows." not in name]
    optimizers = [torch.optim.Adagrad(sparse, 0.05), torch.optim.Adam(others, 0.001)]
    first = torch.arange(FEATURES, device=CARD) * (num_keys // FEATURES) * (num_tables == 1)
    indexed = [torch.from_numpy(ids.T.copy()).to(CARD) + first for ids in batches]

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


def larger_than_the_cache(dim: int, num_samples: int, log: Log, part: int = 4) -> None:
    """A DLRM with ``part`` times the rows that the card may hold, all made beforehand."""
    names, schema = criteo_schema()
    num_rows = sum(map(len, log.rows))
    memory = CacheSize.for_records(num_rows // part, 4 * (dim + 1))
    samples = list(log.samples(num_samples))
    num_timed = len(samples) // 3
    speeds = {}
    for name, device_memory in (("all rows on the card", 0), ("a part", memory), ("host memory", None)):
        trainer = Trainer(dlrm_config(dim, num_samples, f"{device_memory or 0}b"), schema)
        if device_memory is None:
            trainer.collection.read_from(
                LocalRows(trainer.collection.feature_groups, RowwiseAdagrad(0.05), 0)
            )
            trainer._recorder = None  # made for the rows that it had
        source = trainer.collection.source
        _fill(source, names, log.rows)
        batches = prefetch((trainer.prepare(one) for one in samples), 4)
        for batch in islice(batches, 5 if device_memory is None else len(samples) - num_timed):
            trainer.train_step(batch)
        before = source.counts if isinstance(source, CachedDeviceRows) else None
        torch.cuda.synchronize()
        began, count = time.perf_counter(), min(num_timed, 10) if device_memory is None else num_timed
        for batch in islice(batches, count):
            trainer.train_step(batch)
        torch.cuda.synchronize()
        speeds[name] = count * num_samples / (time.perf_counter() - began) / 1e6
        batches.close()
        if isinstance(source, CachedDeviceRows) and before is not None:
            _print_counts(source.counts - before, count, num_rows, source)
        del trainer, batches, source, before, batch
        gc.collect()
        torch.cuda.empty_cache()
    cached, whole, host = speeds["a part"], speeds["all rows on the card"], speeds["host memory"]
    print(
        f"{log.name}, dim {dim}, batch {num_samples:,}, {num_rows:,} rows, {part} times the cache: "
        f"{cached:.2f} M "
        f"samples/s; all rows on the card {whole:.2f} M ({cached / whole:.0%}), rows in host memory "
        f"{host:.2f} M ({cached / host:.1f}x)",
        flush=True,
    )


def _print_counts(counts: CacheCounts, steps: int, num_rows: int, source: CachedDeviceRows) -> None:
    tables, fetched = source.tables[0], counts.num_fetched / steps
    print(
        f"cache of {tables.size.num_records:,} of {num_rows:,} rows, {tables.allocated_bytes / 2**20:,.0f} "
        f"MiB on the card; hit ratio {counts.hit_ratio:.1%}; a step fetches {fetched:,.0f} rows "
        f"({tables.arena.record_bytes * fetched / 1e6:.2f} MB) and moves "
        f"{counts.bytes_to_card / steps / 1e6:.2f} MB to the card and "
        f"{counts.bytes_from_card / steps / 1e6:.2f} MB back"
    )


def _fill(source: Any, names: list[str], rows: list[np.ndarray]) -> None:
    """Make all rows beforehand."""
    for name, ids in zip(names, rows, strict=True):
        tables, position = source.find_table(name)
        for first in range(0, len(ids), 1 << 20):
            keys = keys_of(ids[first : first + (1 << 20)])
            of_id = np.full(len(keys), position)
            if isinstance(source, DeviceRows) and not isinstance(source, CachedDeviceRows):
                there = torch.from_numpy(of_id.astype(np.int32)).to(CARD)
                tables.find_or_make(torch.from_numpy(keys).to(CARD), there)
            else:
                group = tables.host.group if isinstance(source, CachedDeviceRows) else tables
                group.make_fresh(of_id, keys)


class _Placeholder(nn.Module):
    """Stands where a model has its collection: reads the ids that were indexed."""

    def __init__(self, tables: list, rows: IndexedTables) -> None:
        super().__init__()
        self.tables, self.inner, self.ids = tables, rows, torch.empty(0)

    def table_configs(self) -> list:
        return self.tables

    def forward(self, features: object) -> KeyedTensor:
        return self.inner(self.ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["step", "dlrm", "cache", "cluster"])
    chosen = parser.parse_args().only
    print(torch.cuda.get_device_name(), torch.__version__)
    if chosen in (None, "step"):
        sparse_step()
        torch.cuda.empty_cache()
    if chosen in (None, "cache"):
        switch_threads_sooner()  # as `rowhaul train` does
        keep_freed_memory()
        for log in (Log.skewed(60 * 65_536, 12_000_000), Log.criteo_like(40 * 65_536)):
            for dim, num_samples in ((16, 16_384), (16, 65_536), (128, 16_384)):
                larger_than_the_cache(dim, num_samples, log)
    if chosen in (None, "dlrm"):
        for dim, tf32 in ((16, False), (128, True), (128, False)):
            for num_samples in (2048, 16_384, 65_536):
                dlrm(dim, num_samples, 10_000_000 if dim == 128 else 30_000_000, tf32)
                torch.cuda.empty_cache()
    if chosen in (None, "cluster"):
        share_card()


if __name__ == "__main__":
    main()
