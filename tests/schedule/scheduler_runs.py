"""A small scheduler's settings, its ids and its plans."""

from __future__ import annotations

import numpy as np

from rowhaul.schedule import CacheSettings, IdBatch, RowSizes, Scheduler, ScheduleSettings, Topology

NUM_WORKERS = 4


def settings(**changes):
    chosen = {
        "topology": Topology(NUM_WORKERS),
        "sizes": RowSizes(values=(8, 16), state=(0, 4)),
        "prices": (1, 1, 10, 10),
        "cache": CacheSettings(60),
        "dispatcher": "esd:1",
        **changes,
    }
    return ScheduleSettings(**chosen)


def trace(num_batches=12, batch_size=16, seed=0):
    random = np.random.default_rng(seed)
    for _ in range(num_batches):
        ids = random.zipf(1.4, (2, batch_size)) % 200
        yield IdBatch.from_features([0, 1], ids.ravel(), np.ones((2, batch_size), np.int32))


def plans_of(chosen, batches):
    scheduler = Scheduler(chosen, batches)
    while scheduler.fill():
        yield scheduler.plan()
