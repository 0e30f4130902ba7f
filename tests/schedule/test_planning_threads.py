"""Plans are the same for any number of threads, however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest

import rowhaul.schedule.directory.seen as seen
import rowhaul.schedule.sync.exact as exact
import rowhaul.schedule.sync.moves as moves
import rowhaul.schedule.threads as threads
from rowhaul.errors import ConfigError
from rowhaul.schedule import (
    CacheSettings,
    HotRows,
    IdBatch,
    RowSizes,
    Scheduler,
    ScheduleSettings,
    Topology,
)
from rowhaul.schedule.arrays import extended, zeros
from rowhaul.schedule.sync.moves import BETWEEN, NOTHING, WITHIN, places_of_moves
from rowhaul.schedule.threads import Threads

NUM_FEATURES, BATCH, ITERATIONS = 3, 96, 8


def batches(seed):
    random = np.random.default_rng(seed)
    for _ in range(ITERATIONS):
        lengths = (random.random((NUM_FEATURES, BATCH)) < 0.9).astype(np.int32)
        keys = (3 * random.pareto(0.8, int(lengths.sum()))).astype(np.int64) % 400
        yield IdBatch.from_features(range(NUM_FEATURES), keys, lengths)


def digests(settings, seed, num_threads):
    """The plans, and all that decides later ones."""
    scheduler = Scheduler(settings, batches(seed))
    scheduler.use_threads(num_threads)
    plans = []
    while scheduler.fill():
        plans.append(scheduler.plan())
    assert sum(len(plan.evicted_keys) for plan in plans) > 0 or settings.sync == "static"
    state = {name: array.tobytes() for name, array in scheduler.export().items()}
    return [plan.digest() for plan in plans], state


@pytest.mark.parametrize("sync", ["on-demand", "full", "static", "bounded:1"])
@pytest.mark.parametrize("unit", ["rows", "bytes"])
@pytest.mark.parametrize("num_workers", [5, 64])
def test_plans_are_the_same_for_any_number_of_threads(monkeypatch, sync, unit, num_workers):
    for module, name in ((threads, "CHUNK_ROWS"), (exact, "CHUNK_ROWS"), (seen, "ROWS_AT_ONCE")):
        monkeypatch.setattr(module, name, 7)
    monkeypatch.setattr(moves, "MOVES_AT_ONCE", 11)
    capacity = 80 if num_workers == 5 else 7  # little more than one iteration needs
    settings = ScheduleSettings(
        topology=Topology(num_workers, colocated=True, peer_to_peer=sync == "on-demand" and unit == "rows"),
        sizes=RowSizes((8, 8, 20), (4, 0, 4)),
        prices=(1,) * num_workers,
        cache=CacheSettings(capacity if unit == "rows" else 15 * capacity, unit),
        dispatcher="round-robin",
        sync=sync,
        look_ahead=2,
        hot=HotRows(np.zeros(3, np.int32), np.arange(3)),
    )
    expected = digests(settings, num_workers, 1)
    assert digests(settings, num_workers, 2) == expected
    assert digests(settings, num_workers, 3) == expected


@pytest.mark.parametrize("count", [0, 65, 1.5, True])
def test_a_number_of_threads_that_cannot_be_is_refused(count):
    with pytest.raises(ConfigError, match="1 to 64 threads"):
        Threads(count)


def test_an_error_in_a_thread_is_raised():
    def work(counter):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        Threads(3).share(work, 10)


def test_moves_within_a_rank_keep_the_order_they_have_always_had():
    """As in a plain loop: a move between ranks changes places with the first one within a rank."""
    random = np.random.default_rng(0)
    for share in (0.0, 0.1, 0.5, 0.95, 1.0):
        ranks = np.where(random.random(200) < share, WITHIN, BETWEEN).astype(np.uint8)
        empty = random.random(200) < 0.2
        there = np.flatnonzero(~empty)
        order, apart = list(range(len(there))), 0
        for m, place in enumerate(there):
            if ranks[place] == BETWEEN:
                order[m], order[apart] = order[apart], m
                apart += 1
        starts, counts = np.array([0, 90, 90]), np.array([90, 0, 110])
        between, within = places_of_moves(np.where(empty, NOTHING, ranks), starts, counts)
        assert between.tolist() == there[order[:apart]].tolist()
        assert within.tolist() == there[order[apart:]].tolist()


def test_long_arrays_grow_in_place():
    array = zeros(1 << 18, np.int64)
    array[:] = np.arange(1 << 18)
    longer = extended(array, 1 << 20)
    assert np.shares_memory(array, longer)
    copied = extended(longer, 1 << 25)
    for one in (longer, copied):
        assert (one[: 1 << 18] == np.arange(1 << 18)).all()
        assert not one[1 << 18 :].any()
