"""The key index against what Python users have: found, absent and new keys a second, and bytes a key.

The table is far larger than the last-level cache of most machines: 32 million slots, half full. Keys are
random, of 64 bits, in batches of ``--batch``; the peers hold fewer of them, as their lines say. Times are of
the thread's own CPU, or of the clock where threads are compared, which needs an otherwise idle machine.
The one-lock lines are the same index with a lock around every call, which is what sharing a plain hash table
between threads takes. Memory that is freed is kept, as in training.

    python benchmarks/index.py [--slots 33554432]
    python benchmarks/index.py --keys 100000000      # index and records of dim 16, row-wise Adagrad: memory
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from report import console, print_machine, print_table
from rowhaul._environment import keep_freed_memory
from rowhaul.optim import RowwiseAdagrad
from rowhaul.store import TableGroup, TableSpec
from rowhaul.store.index import KeyIndex
from rowhaul.store.shard_memory import SPLIT_KEYS

Int64s = npt.NDArray[np.int64]
PEER_KEYS = 2_000_000  # a dictionary of 16 million keys would take minutes and gigabytes
HYPERECA = 1.4e6
FEW_KEYS = 20_000
TRIES = 9
PASSES = 8  # over the batches where threads are compared: so long that starting them does not count


def random_keys(count: int, seed: int) -> Int64s:
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count)


def whole(batch: Int64s) -> Int64s:
    return np.array([0, len(batch)])


def rate(run: Callable[[Int64s], object], batches: list[Int64s], clock: Callable[[], float]) -> float:
    """Median keys a second."""
    seconds = []
    for batch in batches:
        began = clock()
        run(batch)
        seconds.append((clock() - began) / len(batch))
    return 1 / statistics.median(seconds)


def together(run: Callable[[Int64s], object], batches: list[Int64s]) -> float:
    """Keys a second by the clock of two threads that share the batches."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: time.sleep(0.01), range(2)))  # both have started
        began = time.perf_counter()
        list(pool.map(lambda part: [run(batch) for batch in part], (batches[::2], batches[1::2])))
        return sum(map(len, batches)) / (time.perf_counter() - began)


def alone(run: Callable[[Int64s], object], batches: list[Int64s]) -> float:
    """The same by one."""
    began = time.perf_counter()
    for batch in batches:
        run(batch)
    return sum(map(len, batches)) / (time.perf_counter() - began)


THREADS = {
    "1 thread (clock)": alone,
    "2 threads (clock)": together,
}


class Inserter:
    """Inserts batches, each key at a location of its own."""

    def __init__(self, index: KeyIndex) -> None:
        self.index, self._lock, self._next = index, threading.Lock(), 0

    def __call__(self, batch: Int64s) -> None:
        self.index.find_or_insert(
            batch, whole(batch), lambda absent: self._numbers(len(absent)), lambda spare: None
        )

    def _numbers(self, count: int) -> Int64s:
        with self._lock:
            self._next += count
            return np.arange(self._next - count, self._next)


def one_lock(run: Callable[[Int64s], object]) -> Callable[[Int64s], object]:
    lock = threading.Lock()

    def locked(batch: Int64s) -> None:
        with lock:
            run(batch)

    return locked


def measure_index(num_slots: int, batch: int, repeats: int) -> list[list[object]]:
    """Lines of Rowhaul: one thread by its CPU time, then two against one by the clock."""
    num_keys = num_slots // 2
    keys = random_keys(num_keys, 0)
    index = KeyIndex(1)
    index.reserve([int(0.69 * num_slots)])
    insert = Inserter(index)
    parts = [keys[first : first + batch] for first in range(0, num_keys, batch)]
    inserting = rate(insert, parts, time.thread_time)  # into reserved room, from empty to half full
    console.print(f"{index.num_slots:,} slots, {int(index.num_keys[0]):,} keys, batches of {batch:,}")

    def find(some: Int64s) -> object:
        return index.find(some, whole(some))

    picks = np.random.default_rng(1)
    found = [picks.choice(keys, batch) for _ in range(repeats)]
    absent = [random_keys(batch, seed) for seed in range(100, 100 + repeats)]
    gone = [keys[first : first + batch] for first in range(0, batch * repeats, batch)]
    lines: list[list[object]] = []
    numbers = [rate(find, found, time.thread_time), rate(find, absent, time.thread_time), inserting]
    deleting = rate(lambda some: index.discard(some, whole(some)), gone, time.thread_time)
    for part in gone:
        insert(part)
    lines.append(["Rowhaul, 1 thread (CPU)", *(n / 1e6 for n in numbers), deleting / 1e6])
    growing = KeyIndex(1)
    grown = alone(Inserter(growing), parts[: max(1, len(parts) // 4)])
    lines.append(["Rowhaul, growing from nothing (clock)", "", "", grown / 1e6, ""])
    del growing
    fresh = [random_keys(batch, seed) for seed in range(1000, 1000 + repeats)]
    for name, (look, add) in {
        "Rowhaul": (find, insert),
        "one lock": (one_lock(find), one_lock(insert)),
    }.items():
        rates: dict[str, list[object]] = {threads: [] for threads in THREADS}
        gains: list[float] = []
        for work, batches in ((look, found * PASSES), (look, absent * PASSES), (add, fresh)):
            tries: dict[str, list[float]] = {threads: [] for threads in THREADS}
            for _ in range(TRIES):  # in turns, so that whatever slows the machine slows both
                for threads, run in THREADS.items():
                    if work is add:
                        for some in batches:
                            index.discard(some, whole(some))
                    tries[threads].append(run(work, batches) / 1e6)
            for threads, found_rates in tries.items():
                rates[threads].append(statistics.median(found_rates))
            gains.append(statistics.median(two / one for one, two in zip(*tries.values(), strict=True)))
        lines += [[f"{name}, {threads}", *some, ""] for threads, some in rates.items()]
        lines.append(
            [f"{name}, 2 threads against 1 (median of pairs)", *(f"{one:.2f}x" for one in gains), ""]
        )
    return lines


def fbgemm_map(keys: Int64s) -> Callable[[Int64s], object]:
    """The hash of TorchRec's kernels on a CPU; its locations are of 32 bits."""
    import fbgemm_gpu  # noqa: F401  (registers it)
    import torch

    held = torch.classes.fbgemm.PrunedMapCPU()
    offsets = lambda count: torch.tensor([0, count])  # noqa: E731  # a one-line helper
    held.insert(torch.from_numpy(keys), torch.arange(len(keys), dtype=torch.int32), offsets(len(keys)), 1)
    return lambda some: held.lookup(torch.from_numpy(some), offsets(len(some)))


def measure_peers(batch: int, repeats: int) -> list[list[object]]:
    """What else there is, over fewer keys: they would be slower over more."""
    keys = random_keys(PEER_KEYS, 0)
    picks = np.random.default_rng(1)
    found = [picks.choice(keys, batch) for _ in range(repeats)]
    absent = [random_keys(batch, seed) for seed in range(100, 100 + repeats)]
    by_key = {}
    began = time.thread_time()
    for location, key in enumerate(keys.tolist()):
        by_key[key] = location
    filling = PEER_KEYS / (time.thread_time() - began)
    order = np.argsort(keys)
    in_order = keys[order]

    def search(some: Int64s) -> Int64s:
        at = np.minimum(np.searchsorted(in_order, some), len(keys) - 1)
        return np.where(in_order[at] == some, order[at], -1)

    ways: dict[str, Callable[[Int64s], object]] = {
        "dict": lambda some: np.array([by_key.get(key, -1) for key in some.tolist()]),
        "NumPy searchsorted": search,
    }
    if find_spec("pandas"):
        import pandas

        ways["pandas Index.get_indexer"] = pandas.Index(keys).get_indexer
    else:
        console.print("pandas is not installed: no line for Index.get_indexer")
    if find_spec("fbgemm_gpu"):
        ways["fbgemm PrunedMapCPU"] = fbgemm_map(keys)
    else:
        console.print("fbgemm_gpu is not installed: no line for its CPU hash")
    lines = []
    for name, way in ways.items():
        way(found[0])
        rates = [rate(way, batches, time.thread_time) / 1e6 for batches in (found, absent)]
        lines.append([f"{name}, {PEER_KEYS:,} keys", *rates, filling / 1e6 if name == "dict" else "", ""])
    return lines


def measure_memory(num_keys: int, batch: int) -> None:
    """Bytes a key while a table grows; the peak is of everything that NumPy holds, a batch's arrays too."""
    Inserter(KeyIndex(1))(random_keys(2 * SPLIT_KEYS, 1))  # kernels are loaded now, and not counted
    tracemalloc.start()
    index = KeyIndex(1)
    insert = Inserter(index)
    steady, peak = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
    for first in range(0, num_keys, batch):
        tracemalloc.reset_peak()
        insert(random_keys(batch, first))
        count = int(index.num_keys[0])
        if count >= FEW_KEYS:
            is_large = count > SPLIT_KEYS * 5 // 4
            steady[is_large] = max(steady[is_large], index.allocated_bytes / count)
            peak[is_large] = max(peak[is_large], tracemalloc.get_traced_memory()[1] / count)
    tracemalloc.stop()
    small = KeyIndex(100)
    small.find_or_insert(np.arange(2000), np.arange(101) * 20, lambda absent: absent, lambda spare: None)
    rows = [
        [f"one table, {FEW_KEYS:,} to {SPLIT_KEYS:,} keys", steady[False], peak[False]],
        [f"one table, up to {num_keys:,} keys", steady[True], peak[True]],
        ["100 tables of 20 keys", small.allocated_bytes / 2000, ""],
    ]
    print_table("bytes a key, the largest seen", ["", "steady", "peak, measured"], rows)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure_resident(num_keys: int, batch: int) -> None:
    """A table of dim 16 under row-wise Adagrad that grows key by key: what the process takes."""
    group = TableGroup([TableSpec("t", 16, -0.01, 0.01)], RowwiseAdagrad(lr=0.01), np.float32, 0)
    before, peak, longest = resident_bytes(), 0, 0.0
    began = time.perf_counter()
    for first in range(0, num_keys, batch):
        keys = np.arange(first, min(first + batch, num_keys)) * 0x9E3779B9
        step = time.perf_counter()
        group.lookup(keys, whole(keys), np.array([0]), insert=True)
        longest = max(longest, time.perf_counter() - step)
        peak = max(peak, resident_bytes())
    seconds = time.perf_counter() - began
    record = group.arena.record_bytes
    rows = [
        ["records (bytes a key)", record],
        ["index, slots and rows (bytes a key)", group.index.allocated_bytes / num_keys],
        [
            "resident beyond the records, at the end (bytes a key)",
            (resident_bytes() - before) / num_keys - record,
        ],
        ["resident beyond the records, at the peak (bytes a key)", (peak - before) / num_keys - record],
        ["resident in all (GiB)", (resident_bytes() - before) / 2**30],
        ["million new rows a second, records written", num_keys / seconds / 1e6],
        [f"longest step of {batch:,} new rows (ms)", 1e3 * longest],
    ]
    print_table(f"{num_keys:,} keys, dim 16, row-wise Adagrad", ["", "measured"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=1 << 25)
    parser.add_argument("--batch", type=int, default=1 << 17)
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--keys", type=int, default=0, help="only measure the memory of so many rows")
    options = parser.parse_args()
    print_machine()
    if options.keys:
        measure_resident(options.keys, options.batch)
        return
    keep_freed_memory()  # as training does
    lines = measure_index(options.slots, options.batch, options.repeats)
    lines += measure_peers(options.batch, options.repeats)
    lines.append(["HypeReca, a thread, as reported (remote requests included)", HYPERECA / 1e6, "", "", ""])
    print_table("million keys a second", ["", "found", "absent", "new", "deleted"], lines)
    console.print("HypeReca's number is another measure: it includes requests to other machines.")
    measure_memory(3_000_000, 5_000)


if __name__ == "__main__":
    main()
