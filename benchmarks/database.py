"""Pulls and updates of the embedding database against the machine's own random-gather bandwidth.

The baselines are a loop that only copies scattered rows of one large array into a contiguous one, prefetching
a few rows ahead, and ``torch.index_select`` on a tensor of the same size; the better of the two counts as
100 %. Bytes are those that must move: a gather reads and writes every row; a fused row-wise Adagrad update
reads a gradient, and reads and writes the record (values and accumulator).

Every measurement takes distinct random rows that no earlier one in the same round has touched, from tables
far larger than the last-level cache. One thread is measured in processor time, which other processes disturb
least, two threads in wall time.

    python benchmarks/database.py [--rows 4000000] [--dim 128] [--batch 65536] [--repeats 20]
"""

from __future__ import annotations

from rowhaul import _environment

_environment.set_passive_waiting()  # before PyTorch is imported
_environment.keep_freed_memory()

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from report import console, print_machine, print_table
from rowhaul._kernels import kernel
from rowhaul._memory import copy_bytes, prefetch_to_read
from rowhaul.database import EmbeddingDatabase

WARMUP = 3
_AHEAD = 16


@kernel
def plain_gather(table_address, row_bytes, rows, out_address):
    """The baseline: copy scattered rows, prefetching the next ones."""
    for i in range(len(rows)):
        soon = table_address + rows[min(i + _AHEAD, len(rows) - 1)] * row_bytes
        for offset in range(0, row_bytes, 64):
            prefetch_to_read(soon + offset)
        copy_bytes(out_address + i * row_bytes, table_address + rows[i] * row_bytes, row_bytes)


class Rows:
    """Distinct random rows for every measurement of a round."""

    def __init__(self, num_rows: int, batch: int) -> None:
        self._random, self._num_rows, self._batch = np.random.default_rng(0), num_rows, batch
        self._drawn, self._next = np.empty(0, np.int64), 0

    def take(self) -> np.ndarray:
        if self._next + self._batch > len(self._drawn):
            self._drawn, self._next = self._random.permutation(self._num_rows), 0
        self._next += self._batch
        return np.ascontiguousarray(self._drawn[self._next - self._batch : self._next])


class Bench:
    """The tables, and a function to time for each line of the report."""

    def __init__(self, num_rows: int, dim: int, batch: int) -> None:
        self.dim, self.batch, self.rows = dim, batch, Rows(num_rows, batch)
        self.db = EmbeddingDatabase({"t": dim}, "rowwise_adagrad", lr=0.01, num_threads=2)
        for first in range(0, num_rows, 1 << 19):
            self.db.prefetch(np.arange(first, min(first + (1 << 19), num_rows))).wait()
        self.table = np.ones((num_rows, dim), np.float32)
        self.weights = torch.ones(num_rows, dim)
        self.out = torch.empty(batch, dim)
        self.gradients = torch.randn(batch, dim)
        self.pool = ThreadPoolExecutor(1)

    def plain(self, threads: int) -> Callable[[], object]:
        rows = self.rows.take()
        address, row_bytes = self.table.ctypes.data, self.dim * 4
        half = len(rows) // 2

        def run() -> None:
            if threads == 1:
                plain_gather(address, row_bytes, rows, self.out.data_ptr())
                return
            other = self.pool.submit(
                plain_gather, address, row_bytes, rows[half:], self.out[half:].data_ptr()
            )
            plain_gather(address, row_bytes, rows[:half], self.out.data_ptr())
            other.result()

        return run

    def index_select(self, threads: int) -> Callable[[], object]:
        rows = torch.from_numpy(self.rows.take())
        torch.set_num_threads(threads)
        return lambda: torch.index_select(self.weights, 0, rows, out=self.out)

    def pull(self, threads: int, out: torch.Tensor | None = None) -> Callable[[], object]:
        ticket = self.db.prefetch(self.rows.take())
        ticket.wait()
        self.db._pieces.num_threads = threads
        return lambda: self.db.pull(ticket, out=out)

    def update(self, threads: int) -> Callable[[], object]:
        ticket = self.db.prefetch(self.rows.take())
        ticket.wait()
        self.db._pieces.num_threads = threads

        def run() -> None:
            self.db.push(ticket, self.gradients)
            self.db.update()

        return run

    def lines(self) -> dict[str, tuple[Callable[[int], Callable[[], object]], int]]:
        """The measurements, and the bytes that each moves per row."""
        row, record = 4 * self.dim, 4 * (self.dim + 1)
        return {
            "plain gather": (self.plain, 2 * row),
            "torch.index_select": (self.index_select, 2 * row),
            "pull, into a given tensor": (lambda threads: self.pull(threads, self.out), 2 * row),
            "pull, into a new tensor": (self.pull, 2 * row),
            "push + update (row-wise Adagrad)": (self.update, row + 2 * record),
        }


def measure(bench: Bench, threads: int, repeats: int) -> dict[str, float]:
    """Median seconds of every line, interleaved; processor time of one thread, wall time of two."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in bench.lines()}
    for repeat in range(WARMUP + repeats):
        for name, (prepare, _) in bench.lines().items():
            run = prepare(threads)
            began = clock()
            run()
            if repeat >= WARMUP:
                seconds[name].append(clock() - began)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    print_machine()
    bench = Bench(options.rows, options.dim, options.batch)
    console.print(f"database: {bench.db.memory()}")
    for threads in (1, 2):
        medians = measure(bench, threads, options.repeats)
        bandwidths = {
            name: options.batch * row_bytes / medians[name] / 1e9
            for name, (_, row_bytes) in bench.lines().items()
        }
        best = max(bandwidths["plain gather"], bandwidths["torch.index_select"])
        clock = "processor time" if threads == 1 else "wall time"
        print_table(
            f"{options.batch:,} distinct rows of {options.dim} floats, {threads} thread(s), {clock}",
            ["", "ms", "ns per row", "GB/s", "of the best gather"],
            [
                [
                    name,
                    1e3 * taken,
                    1e9 * taken / options.batch,
                    bandwidths[name],
                    f"{bandwidths[name] / best:.0%}",
                ]
                for name, taken in medians.items()
            ],
        )
    seconds = []
    for _ in range(options.repeats):
        keys = bench.rows.take()
        began = time.perf_counter()
        bench.db.prefetch(keys).wait()
        seconds.append(time.perf_counter() - began)
    rate = options.batch / statistics.median(seconds) / 1e6
    console.print(f"prefetch, in its own thread: {rate:.1f} million known keys per second (wall time)")
    bench.db.close()


if __name__ == "__main__":
    main()
