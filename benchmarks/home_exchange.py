"""Ranks of one host that leave rows at home, without caches and without a plan: what would they cost?

`rowhaul train` plans on every host which rows move between the caches of its ranks, which pays where links
are slow. Ranks that share memory could do without: each stores the rows whose hash is its own, asks the
others for the rows of its samples and hands their gradients back; every home takes one step for each row, by
the gradients of all ranks in the order of ranks. What is learned is what one process learns; this checks it.
It measures a way that the library does not go yet: here it trains, and does nothing else.

Beside it: one rank alone, as many that share nothing, and one process with as many threads, in turns, each
rank pinned to a core. `scaling.py` measures ranks as they are, with a plan.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, types

from report import print_machine, print_table
from rowhaul._atomic import load_acquire, store_release
from rowhaul._environment import keep_freed_memory, set_passive_waiting, switch_threads_sooner
from rowhaul.data.prefetch import prefetch
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.nn import Batch
from rowhaul.nn.local_rows import TableRows
from rowhaul.nn.pooled import PooledRead, pooled_read
from rowhaul.runtime.own_samples import part_of
from rowhaul.store import Lookup
from rowhaul.train import TrainConfig
from rowhaul.train.trainer import Trainer

WARM_UP, CHECKED = 40, 30  # steps before the clock starts; steps whose losses are compared
MOST_ROWS, MOST_TABLES, MOST_WEIGHTS = 1 << 16, 64, 400_000  # of a rank's part of a batch; of a model
SHARED = "/dev/shm"  # memory, where there is one
TICKS = 4096  # bytes, a line of the cache for each rank
PATIENCE = 120.0  # seconds for a rank to come: it may have kernels to compile
LOOKS = 1_000_000  # until Python looks at the clock

_yield = types.ExternalFunction("sched_yield", types.int32())
Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@njit(nogil=True)
def meet(ticks: int, rank: int, num_ranks: int, number: int) -> bool:
    """Wait until all ranks have come this far; what they wrote before can be read then."""
    store_release(ticks + 64 * rank, number)
    looks = 0
    for other in range(num_ranks):
        while load_acquire(ticks + 64 * other) < number:
            looks += 1
            if looks % 64 == 0:
                _yield()
            if looks > LOOKS:
                return False
    return True


@njit(nogil=True)
def homes_of(keys, num_ranks, homes):
    """The rank that stores each key, the same on all of them."""
    for i in range(len(keys)):
        homes[i] = ((np.uint64(keys[i]) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(48)) % np.uint64(
            num_ranks
        )


@njit(nogil=True)
def add_parts(locations, gradients, number_of, first, sums, where):
    """Add gradients to the sums of their rows, of which there are ``first``; returns how many there are then.

    ``number_of`` has the number of each record's sum, plus one, or zero.
    """
    for i in range(len(locations)):
        number = number_of[locations[i]]
        if number == 0:
            where[first], sums[first] = locations[i], gradients[i]
            first += 1
            number_of[locations[i]] = first
        else:
            for column in range(sums.shape[1]):
                sums[number - 1, column] += gradients[i, column]
    return first


class Board:
    """What one rank shows the others: in shared memory, which all of them map."""

    def __init__(self, memory: npt.NDArray[np.uint8], num_ranks: int, dim: int) -> None:
        self._memory, self._used = memory, 0
        self.starts: Int64s = self._array((num_ranks, MOST_TABLES + 1), np.int64)  # of the keys asked of each
        self.keys: Int64s = self._array((num_ranks, MOST_ROWS), np.int64)
        self.values: Floats = self._array(
            (num_ranks, MOST_ROWS, dim), np.float32
        )  # of the rows each asked for
        self.gradients: Floats = self._array((num_ranks, MOST_ROWS, dim), np.float32)
        self.dense: Floats = self._array((MOST_WEIGHTS,), np.float32)

    def _array(self, shape: tuple[int, ...], dtype: type[Any]) -> npt.NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        first, self._used = self._used, self._used + -(-size // 64) * 64
        return self._memory[first : first + size].view(dtype).reshape(shape)

    @staticmethod
    def num_bytes(num_ranks: int, dim: int) -> int:
        """Bytes of a board."""
        rows = num_ranks * MOST_ROWS * (8 + 2 * 4 * dim)
        return rows + num_ranks * 8 * (MOST_TABLES + 1) + 4 * MOST_WEIGHTS + 1024


class HomeRows(TableRows):
    """Reads rows from the ranks that store them, and steps those that are stored here."""

    def __init__(self, trainer: Trainer, memory: str, rank: int, num_ranks: int) -> None:
        local = trainer.collection.source
        assert isinstance(local, TableRows)
        super().__init__(local.groups, local.tables)
        self.rank, self.num_ranks, self._number = rank, num_ranks, 0
        everything = np.memmap(memory, np.uint8, "r+")
        size = Board.num_bytes(num_ranks, self.dim)
        self._ticks = everything.ctypes.data
        at = [TICKS + number * size for number in range(num_ranks)]
        self.boards = [Board(everything[first : first + size], num_ranks, self.dim) for first in at]
        self._numbers = np.zeros(1 << 22, np.int32)
        self._asked: list[Int64s] = []  # places of the rows whose home each rank is, among those of the batch
        self._locations: list[Int64s] = []  # of the rows here that each rank trains

    @property
    def dim(self) -> int:
        """Columns of a row."""
        return self.groups[0].dim

    def wait(self) -> None:
        """Meet the others."""
        self._number += 1
        latest = time.monotonic() + PATIENCE
        while not meet(self._ticks, self.rank, self.num_ranks, self._number):
            if time.monotonic() > latest:
                sys.exit(f"a rank did not come within {PATIENCE:g} s")

    def read(self, features: Any, *, training: bool, on_unknown: str) -> list[PooledRead]:
        """Find the rows of a batch, here and elsewhere."""
        group, tables, mine = self.groups[0], self.tables[0], self.boards[self.rank]
        ids, entries, offsets = group.ids_of(features)
        keys, starts, inverse = tables.distinct(*ids)
        homes = np.empty(len(keys), np.int64)
        homes_of(keys, self.num_ranks, homes)
        self._asked = [np.flatnonzero(homes == home) for home in range(self.num_ranks)]
        for home, places in enumerate(self._asked):
            mine.keys[home, : len(places)] = keys[places]
            mine.starts[home, : len(starts)] = np.searchsorted(places, starts)
        self.wait()  # for what the others ask for, and for their last step
        self._locations = []
        for rank, board in enumerate(self.boards):
            asked_starts = board.starts[self.rank, : len(starts)]
            asked = board.keys[self.rank, : asked_starts[-1]]
            self._locations.append(tables.find_or_make(asked.copy(), asked_starts.copy()))
            if rank != self.rank:
                records = tables.arena.read(self._locations[rank])
                mine.values[rank, : len(asked)] = records[:, : self.dim]
        self.wait()  # for the values
        locations, spare = np.empty(len(keys), np.int64), np.empty((len(keys), self.dim), np.float32)
        count = 0
        for home, places in enumerate(self._asked):
            if home == self.rank:
                locations[places] = self._locations[home]
                continue
            spare[count : count + len(places)] = self.boards[home].values[self.rank, : len(places)]
            locations[places] = -1 - np.arange(count, count + len(places))
            count += len(places)
        lookup = Lookup(keys, starts, inverse, locations, spare)
        return [pooled_read(tables, group, lookup, entries, offsets, partial(self._keep, 0, tables.arena))]

    def show_gradients(self) -> None:
        """Hand gradients over to the homes of their rows."""
        ((_, gradients),) = self.pending[0]
        for home, places in enumerate(self._asked):
            np.take(gradients, places, axis=0, out=self.boards[self.rank].gradients[home, : len(places)])
        self.pending[0] = []

    def step(self, lr: float, number: int) -> None:
        """Step the rows that are stored here."""
        count = sum(map(len, self._locations))
        sums, where, used = np.empty((count, self.dim), np.float32), np.empty(count, np.int64), 0
        for board, locations in zip(self.boards, self._locations, strict=True):
            gradients = board.gradients[self.rank, : len(locations)]
            used = add_parts(locations, gradients, self._numbers, used, sums, where)
        self._numbers[where[:used]] = 0
        self.tables[0].update(where[:used], sums[:used], lr, number)


def train(way: str, folder: str, per_rank: int, rank: int, num_ranks: int, memory: str) -> None:
    """Train as one rank, pinned to a core for each thread; print what a step took, and the first losses."""
    threads = num_ranks if way == "threads" else 1
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[rank : rank + threads])
    set_passive_waiting()
    torch.set_num_threads(threads)
    keep_freed_memory()
    schema = Schema.read(f"{folder}/schema.yaml")
    size = per_rank * (num_ranks if way in ("home", "threads") else 1)
    trainer = Trainer(TrainConfig(batch_size=size), schema)
    trainer.total_steps = 1 << 40
    rows: HomeRows | None = None
    if way == "home":
        switch_threads_sooner()
        rows = HomeRows(trainer, memory, rank, num_ranks)
        trainer.collection.read_from(rows)

    def batches() -> Iterator[Batch]:
        while True:
            for samples in SampleStream(f"{folder}/part-*.parquet", schema, batch_size=size):
                if len(samples) == size and rows is not None:
                    worker = (np.arange(size) % num_ranks).astype(np.int32)
                    yield Batch.from_samples(part_of(samples, worker, rank), global_size=size)
                elif len(samples) == size:
                    yield trainer.prepare(samples)

    losses, ends = [], []
    ahead = prefetch(batches(), 2)
    for _ in range(WARM_UP + max(30, min(300, 150_000 // per_rank))):
        batch = next(ahead)
        losses.append(float(trainer.train_step(batch) if rows is None else shared_step(trainer, rows, batch)))
        ends.append(time.perf_counter())
    taken = statistics.median(np.diff(ends[WARM_UP - 1 :]).tolist())
    print(json.dumps({"seconds": taken, "losses": losses[:CHECKED]}), flush=True)
    os._exit(0)  # the reader reads without end


def shared_step(trainer: Trainer, rows: HomeRows, batch: Batch) -> float:
    """One step of all ranks together; returns this rank's part of the loss."""
    trainer.model.train()
    trainer.set_rates()
    loss = trainer._backward(batch)
    rows.show_gradients()
    parameters = list(trainer.model.parameters())
    sizes = [one.numel() for one in parameters]
    own = torch.cat([one.grad.reshape(-1) for one in parameters if one.grad is not None])
    rows.boards[rows.rank].dense[: len(own)] = own.numpy()
    rows.wait()  # for the gradients of all
    total = rows.boards[0].dense[: len(own)].copy()
    for board in rows.boards[1:]:
        total += board.dense[: len(own)]
    for one, part in zip(parameters, torch.from_numpy(total).split(sizes), strict=True):
        one.grad = part.view_as(one)
    rows.step(trainer.config.rows.lr, trainer.step + 1)
    trainer.dense.step()
    trainer.dense.zero_grad()
    trainer.step += 1
    return loss.item()


def measure(way: str, folder: str, per_rank: int, num_ranks: int, dim: int) -> list[dict[str, Any]]:
    """Run one side; return what each of its processes says."""
    count = num_ranks if way in ("home", "apart") else 1
    threads = num_ranks if way == "threads" else 1
    size = TICKS + num_ranks * Board.num_bytes(num_ranks, dim)
    with tempfile.NamedTemporaryFile(dir=SHARED if os.path.isdir(SHARED) else None) as memory:
        memory.truncate(size)
        command = [sys.executable, __file__, "--as", way, folder, str(per_rank)]
        children = [
            subprocess.Popen(
                [*command, str(rank), str(num_ranks), memory.name],
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                stdout=subprocess.PIPE,
            )
            for rank in range(count)
        ]
        outputs = [child.communicate(timeout=600)[0] for child in children]
    if any(child.returncode for child in children):
        sys.exit("a process that trains has failed")
    return [json.loads(output) for output in outputs]


def check(found: list[dict[str, Any]], expected: dict[str, Any]) -> float:
    """The largest relative difference of losses from those of one process; ends where it is no rounding."""
    losses = np.sum([one["losses"] for one in found], axis=0)
    difference = float(np.max(np.abs(losses / expected["losses"] - 1)))
    if not difference < 1e-3:
        sys.exit(f"ranks that leave rows at home learn something else: losses differ by {difference:.1e}")
    return difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--as", dest="way", default="")
    parser.add_argument("--per-rank", default="2048,512,128")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("rest", nargs="*")
    given = parser.parse_args()
    if given.way:
        folder, per_rank, rank, num_ranks, memory = given.rest
        train(given.way, folder, int(per_rank), int(rank), int(num_ranks), memory)
        return
    if (cores := len(os.sched_getaffinity(0))) < given.ranks:
        sys.exit(f"this benchmark pins {given.ranks} ranks to a core each; cores here: {cores}")
    print_machine()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(temporary) / "log")
        generate = [sys.executable, "-m", "rowhaul", "generate", "--rows", "400000", "--out", folder]
        subprocess.run(generate, check=True, stdout=subprocess.DEVNULL)
        dim = TrainConfig().model.embedding_dim
        for per_rank in map(int, given.per_rank.split(",")):
            ratios: dict[str, list[float]] = {"home": [], "threads": [], "apart": []}
            differences, alone = [], []
            for _ in range(given.repeats):
                one = measure("alone", folder, per_rank, given.ranks, dim)[0]["seconds"]
                alone.append(per_rank / one)
                sides = {way: measure(way, folder, per_rank, given.ranks, dim) for way in ratios}
                for way, found in sides.items():
                    ratios[way].append(given.ranks * one / max(process["seconds"] for process in found))
                differences.append(check(sides["home"], sides["threads"][0]))
            medians = [statistics.median(found) for found in ratios.values()]
            rows.append([f"{per_rank:,}", statistics.median(alone), *medians, f"{max(differences):.0e}"])
    count = f"{given.ranks} "
    columns = ["samples a rank", "one rank, samples/s", f"{count}ranks, rows at home: ratio"]
    columns += [f"one process, {count}threads: ratio", f"{count}apart: ratio", "losses differ by"]
    print_table("default DLRM, ranks of one host, a core each", columns, rows)


if __name__ == "__main__":
    main()
