"""Plans are the same for any number of threads, however the work is cut."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import rowhaul.schedule.directory.seen as seen
import rowhaul.schedule.dispatch.joint.problem as problem
import rowhaul.schedule.dispatch.joint.search as search
import rowhaul.schedule.sync.exact as exact
import rowhaul.schedule.sync.moves as moves
import rowhaul.schedule.threads as threads
from rowhaul._kernels import kernel
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
from rowhaul.schedule.threads import (
    CLOSED,
    Threads,
    await_parts,
    finish_part,
    next_part,
    open_step,
    rest,
)

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


@pytest.mark.parametrize("dispatcher", ["joint", "joint:objective=makespan"])
def test_samples_placed_together_are_placed_the_same_by_any_number_of_threads(monkeypatch, dispatcher):
    """Windows of the search have three parts here."""
    for module, name, value in (
        (threads, "CHUNK_ROWS", 7), (problem, "CHUNK_SAMPLES", 5), (search, "WINDOWS", 2),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    settings = ScheduleSettings(
        topology=Topology(5, colocated=True),
        sizes=RowSizes((8, 8, 20), (4, 0, 4)),
        prices=(1, 1, 2, 3, 10),
        cache=CacheSettings(80),
        dispatcher=dispatcher,
        look_ahead=2,
    )
    expected = digests(settings, 3, 1)
    for num_threads in (2, 3):
        assert digests(settings, 3, num_threads) == expected


@kernel
def count_steps(board, num_steps, num_parts, done):
    """Every part of a step adds what the step before has left in all of them."""
    for step in range(num_steps):
        total = done[:num_parts].sum()
        done[num_parts] = step + total
        open_step(board, num_parts)
        part = next_part(board)
        while part >= 0:
            done[part] += 1 + done[num_parts] % 3
            finish_part(board)
            part = next_part(board)
        await_parts(board, num_parts)
    return num_steps


@kernel
def help_to_count(board, num_parts, done):
    spins, part = 0, next_part(board)
    while part != CLOSED:
        if part >= 0:
            done[part] += 1 + done[num_parts] % 3
            finish_part(board)
        else:
            spins = rest(spins)
        part = next_part(board)


def test_each_step_sees_everything_that_the_step_before_wrote():
    results = []
    for count in (1, 2, 4):
        done = np.zeros(6, np.int64)
        led = Threads(count).lead(
            lambda board, done=done: count_steps(board, 20_000, 5, done),
            lambda board, done=done: help_to_count(board, 5, done),
            5,
        )
        assert led == 20_000
        results.append(done.tolist())
    assert results[0] == results[1] == results[2]
    assert len(set(results[0][:5])) == 1


def test_helpers_go_home_when_the_leader_fails():
    threads = Threads(2)
    with pytest.raises(ValueError, match="broken"):
        threads.lead(
            lambda board: int("broken"), lambda board: help_to_count(board, 5, np.zeros(6, np.int64)), 5
        )
    done = np.zeros(6, np.int64)
    assert threads.lead(lambda board: count_steps(board, 3, 5, done), lambda board: None, 5) == 3


def test_helpers_go_home_when_another_cannot_begin(monkeypatch):
    threads, begun = Threads(3), []
    submit = threads._pool.submit

    def submit_one(assist, board):
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(submit(assist, board))
        return begun[0]

    monkeypatch.setattr(threads._pool, "submit", submit_one)
    with pytest.raises(RuntimeError, match="new thread"):
        threads.lead(lambda board: None, lambda board: help_to_count(board, 5, np.zeros(6, np.int64)), 5)
    assert begun[0].cancelled() or begun[0].result(60) is None


@pytest.mark.parametrize(("count", "most_parts", "helpers"), [(4, 1, 0), (4, 3, 2), (2, 9, 1), (1, 9, 0)])
def test_no_more_threads_look_for_parts_than_there_are(count, most_parts, helpers):
    entered = threading.Semaphore(0)

    def lead(board):
        for _ in range(helpers):
            assert entered.acquire(timeout=60)
        return not entered.acquire(timeout=0.1)

    assert Threads(count).lead(lead, lambda board: entered.release(), most_parts)


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
