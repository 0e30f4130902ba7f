"""How long a whole decision takes (costs, dispatch, evictions, plan), and what the directory weighs.

python benchmarks/decision.py

1,024 samples of 26 ids for 8 workers, from the Criteo-like log, ESD's links. Herald reports 7.7 ms on
16 threads for its own decision at this size; here it is one thread. Finding a batch's rows when it enters
the look-ahead window is shown apart; reading the ids is not counted.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from figures.traces import Trace, generated
from report import print_machine, print_table
from rowhaul import _environment
from rowhaul.schedule import (
    CacheSettings,
    RowSizes,
    Scheduler,
    ScheduleSettings,
    Topology,
    link_prices,
)
from rowhaul.schedule.directory.seen import SeenRows

NUM_WORKERS = 8
BATCH = 1024
ITERATIONS = 150
WARM_UP = 50
CACHE_SHARE = 0.08
ROUNDS = 5
DISPATCHERS = ("random", "laia", "esd:0", "esd:0.5", "esd:1", "joint")
POLICIES = ("lru", "lfu", "emark", "belady")
LINKS = [5e9 / 8] * 4 + [0.5e9 / 8] * 4


def decide(trace: Trace, settings: ScheduleSettings) -> list[float]:
    """Milliseconds: the decision's median and 99th percentile, the look-up's median."""
    batches = list(trace.batches(BATCH)())
    scheduler = Scheduler(settings, batches)
    looking_up, deciding = [], []
    began = time.perf_counter()
    while scheduler.fill():
        looked_up = time.perf_counter()
        scheduler.plan()
        decided = time.perf_counter()
        looking_up.append(looked_up - began)
        deciding.append(decided - looked_up)
        began = decided
    decisions = np.array(deciding[WARM_UP:]) * 1e3
    return [np.median(decisions), np.percentile(decisions, 99), np.median(looking_up[WARM_UP:]) * 1e3]


def main() -> None:
    _environment.keep_freed_memory()
    print_machine()
    trace = generated("criteo", BATCH * ITERATIONS)
    settings = ScheduleSettings(
        topology=Topology(NUM_WORKERS),
        sizes=RowSizes(values=(2048,) * trace.num_tables, state=(0,) * trace.num_tables),
        prices=link_prices(LINKS),
        cache=CacheSettings(int(trace.num_rows * CACHE_SHARE)),
        first_touch=False,
    )
    variants = {f"{name}, lru": settings.with_dispatcher(name) for name in DISPATCHERS}
    for policy in POLICIES[1:]:
        cache = replace(settings.cache, policy=policy)
        variants[f"esd:1, {policy}"] = replace(settings, dispatcher="esd:1", cache=cache)
    rounds: dict[str, list[list[float]]] = {name: [] for name in variants}
    for _ in range(ROUNDS):  # taking turns, so that a noisy moment does not hit one alone
        for name, variant in variants.items():
            rounds[name].append(decide(trace, variant))
    print_table(
        f"a decision, ms: {BATCH} samples x {trace.num_tables} ids, {NUM_WORKERS} workers, "
        f"{trace.num_rows:,} rows in the log",
        ["dispatcher, cache policy", "median", "99th percentile", "look-up"],
        [[name, *np.median(rounds[name], axis=0)] for name in variants],
    )
    seen, began = SeenRows(), time.perf_counter()
    for start in range(0, 100_000_000, 1_000_000):
        seen.add(np.zeros(1_000_000, np.int32), np.arange(start, start + 1_000_000))
    print(
        f"100 million rows ever trained: {seen.memory_bytes / 1e9:.2f} GB, {seen.memory_bytes / 1e8:.1f} "
        f"bytes each, {time.perf_counter() - began:.0f} s to add; with first touch off, nothing"
    )


if __name__ == "__main__":
    main()
