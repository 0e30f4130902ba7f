"""What joint dispatch costs in moves and in processor time, by workers, batch, links and topology.

    python benchmarks/joint_budget.py [--sizes 8x128 8x4096] [--against OTHER/src]

Generated logs, 26 and 22 ids a sample. Costs are rows times link price, an iteration, relative to `joint`
as it is by default; times are CPU microseconds a sample of the dispatcher alone. LRU caches of 8 % of the
rows, first touch off, the first quarter of the iterations left out. ``--against`` adds `joint` of another
version of Rowhaul, run over the same batches in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from figures.traces import Trace, generated
from report import console, print_machine, print_table
from rowhaul import _environment
from rowhaul.schedule import CacheSettings, RowSizes, Scheduler, ScheduleSettings, Topology
from rowhaul.schedule.dispatch import make_dispatcher
from rowhaul.schedule.dispatch.task import DispatchTask

ITERATIONS = {"8x16": 200, "8x128": 60, "8x4096": 12, "64x2048": 6}
LOGS = ("criteo", "avazu")
LINKS = ("equal", "10:1")
TOPOLOGIES = ("servers", "peers")
DISPATCHERS = ("joint", "joint:1", "joint:8", "esd:1", "laia")
CACHE_SHARE = 0.08


class Timed:
    """A dispatcher that notes its CPU time."""

    def __init__(self, text: str) -> None:
        self._inner = make_dispatcher(text)
        self.name = self._inner.name
        self.seconds: list[float] = []

    def assign(self, task: DispatchTask) -> npt.NDArray[np.int32]:
        began = time.thread_time()
        worker = self._inner.assign(task)
        self.seconds.append(time.thread_time() - began)
        return worker


def run(trace: Trace, size: str, links: str, topology: str, dispatcher: str) -> tuple[float, float]:
    """The cost of an iteration, and CPU microseconds a sample."""
    workers, samples = map(int, size.split("x"))
    slow = 1 if links == "equal" else 10
    prices = (1,) * (workers - workers // 2) + (slow,) * (workers // 2)
    timed = Timed(dispatcher)
    peers = topology == "peers"
    settings = ScheduleSettings(
        topology=Topology(workers, colocated=peers, peer_to_peer=peers),
        sizes=RowSizes(values=(16,) * trace.num_tables, state=(1,) * trace.num_tables),
        prices=prices,
        cache=CacheSettings(int(trace.num_rows * CACHE_SHARE)),
        dispatcher=timed,
        first_touch=False,
    )
    scheduler = Scheduler(settings, trace.batches(workers * samples)())
    costs = []
    while scheduler.fill():
        rows, _ = scheduler.plan().counts()
        costs.append((rows * np.array(prices)).sum())
    skipped = len(costs) // 4
    microseconds = 1e6 * float(np.median(timed.seconds[skipped:])) / (workers * samples)
    return float(np.mean(costs[skipped:])), microseconds


def run_elsewhere(source: str, *case: str) -> tuple[float, float]:
    """`run` with `joint` of another version, in a process of its own."""
    command = [sys.executable, __file__, "--case", *case]
    paths = os.pathsep.join([source, os.path.dirname(os.path.abspath(__file__))])
    environment = {**os.environ, "PYTHONPATH": paths}
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    cost, microseconds = json.loads(printed.splitlines()[-1])
    return cost, microseconds


def trace_of(log: str, size: str) -> Trace:
    workers, samples = map(int, size.split("x"))
    return generated(log, workers * samples * ITERATIONS[size])


def print_size(size: str, dispatchers: Sequence[str], against: str | None) -> None:
    lines = []
    for log, links, topology in product(LOGS, LINKS, TOPOLOGIES):
        found = [run(trace_of(log, size), size, links, topology, one) for one in dispatchers]
        if against:
            found.append(run_elsewhere(against, log, size, links, topology))
        least = found[0][0]
        cells = [f"{cost / least:.3f}, {microseconds:.2f} us" for cost, microseconds in found]
        lines.append([log, links, topology, f"{least:,.0f}", *cells])
        console.print(f"{size} {log} {links} {topology} done")
    columns = [
        "log",
        "links",
        "topology",
        "cost",
        *dispatchers,
        *(["joint, other version"] if against else []),
    ]
    print_table(f"{size}: cost relative to joint, CPU time a sample", columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=ITERATIONS, default=list(ITERATIONS))
    parser.add_argument("--dispatchers", nargs="+", default=list(DISPATCHERS))
    parser.add_argument("--against", metavar="SOURCE", help="the src folder of another version")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    _environment.keep_freed_memory()
    if given.case:
        log, size, links, topology = given.case
        print(json.dumps(run(trace_of(log, size), size, links, topology, "joint")))
        return
    print_machine()
    for size in given.sizes:
        print_size(size, given.dispatchers, given.against)


if __name__ == "__main__":
    main()
