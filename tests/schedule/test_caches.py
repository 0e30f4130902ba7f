"""Caches evict exactly what the obvious ones do, for every policy, unit and mix of sizes."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_caches import NaiveCaches

from rowhaul.errors import ConfigError
from rowhaul.schedule.caches import Caches
from slow_cases import mostly_slow

POLICIES = [
    "lru",
    "lfu",
    "emark",
    "emark:mark,latest,frequency",
    "emark:frequency,mark,latest",
    "emark:latest,frequency,mark",
    "belady",
]


def mask(workers):
    return sum(1 << worker for worker in workers)


class Harness:
    """Drives fast and naive caches with the same rows; slots are recycled in a random order."""

    def __init__(self, rng, capacities, unit, policy, sizes):
        self.rng, self.sizes = rng, sizes
        self.fast = Caches(capacities, unit, policy)
        self.naive = NaiveCaches(capacities, unit, policy)
        self.slot_of, self.row_of, self.free = {}, {}, []
        self.size = np.zeros(0, np.int64)
        self.head = np.zeros(0, np.int32)
        self.iteration = -1

    def slot(self, row):
        if row not in self.slot_of:
            if not self.free:
                grown = len(self.size) + int(self.rng.integers(1, 9))
                self.free += range(len(self.size), grown)
                self.head = np.concatenate([self.head, np.full(grown - len(self.size), -1, np.int32)])
                self.fast.use_heads(self.head)
                self.size = np.concatenate([self.size, np.zeros(grown - len(self.size), np.int64)])
            slot = self.free.pop(int(self.rng.integers(len(self.free))))
            self.slot_of[row], self.row_of[slot] = slot, row
            self.size[slot] = self.sizes[row]
        return self.slot_of[row]

    def fast_step(self, trainers, current, next_use):
        rows = sorted(trainers)
        slots = np.array([self.slot(row) for row in rows], np.int32)
        shown = np.zeros(len(self.size), np.int32)
        for row, slot in self.slot_of.items():
            shown[slot] = next_use.get(row, 0)
        return self.fast.step(
            self.iteration,
            slots,
            np.array([mask(trainers[row]) for row in rows], np.uint64),
            np.array([mask(current[row]) for row in rows], np.uint64),
            self.size,
            shown,
        )

    def step(self, trainers, current, next_use):
        self.iteration += 1
        evictions = self.fast_step(trainers, current, next_use)
        victims = [
            (int(w), self.row_of[int(s)]) for w, s in zip(evictions.workers, evictions.slots, strict=True)
        ]
        assert victims == self.naive.step(self.iteration, trainers, current, self.sizes, next_use)
        for slot in {int(slot) for slot in evictions.slots}:
            if self.fast.head[slot] < 0:
                del self.slot_of[self.row_of.pop(slot)]
                self.free.append(slot)
                self.size[slot] = -1
        return victims

    def holders(self, slot):
        copy = self.fast.head[slot]
        while copy >= 0:
            yield self.fast.copies["worker"][copy]
            copy = self.fast.copies["next"][copy]

    def check_contents(self):
        for worker, cache in enumerate(self.naive.workers):
            assert self.fast.used[worker] == cache.used(self.sizes)
            held = {row for row, slot in self.slot_of.items() if worker in self.holders(slot)}
            assert held == set(cache.copies)


def random_batch(rng, universe, num_workers, most_rows):
    """A skewed choice of rows and, of each, at least one worker that trains it."""
    picks = (len(universe) * rng.random(int(rng.integers(1, most_rows + 1))) ** 2).astype(int)
    trainers = {}
    for row in {universe[pick] for pick in picks}:
        chosen = rng.random(num_workers) < rng.choice([0.1, 0.5])
        chosen[rng.integers(num_workers)] = True
        trainers[row] = set(np.flatnonzero(chosen).tolist())
    return trainers


def window(batches, iteration, length):
    """The next iteration that uses each row, as far as a window shows it."""
    uses = {}
    for ahead in range(min(length, len(batches) - 1 - iteration), 0, -1):
        uses |= dict.fromkeys(batches[iteration + ahead], iteration + ahead)
    return uses


def largest_need(batches, num_workers, room):
    return [
        max(sum(room(row) for row in batch if worker in batch[row]) for batch in batches)
        for worker in range(num_workers)
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("unit", mostly_slow(["rows", "bytes"], "rows"))
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_workers=st.sampled_from([1, 2, 3, 8, 64]),
    num_keys=st.integers(2, 60),
    table_sizes=st.lists(st.sampled_from([1, 8, 12, 64, 100]), min_size=1, max_size=4),
    look_ahead=st.integers(0, 6),
    slack=st.floats(0, 1.5),
    sync=st.sampled_from(["on-demand", "full", "any"]),
)
def test_same_victims_as_the_naive_caches(
    policy, unit, seed, num_workers, num_keys, table_sizes, look_ahead, slack, sync
):
    rng = np.random.default_rng(seed)
    tables = rng.integers(0, len(table_sizes), num_keys).tolist()
    universe = [(table, int(rng.integers(-5, 5)) * 1000 + key) for key, table in enumerate(tables)]
    sizes = {row: table_sizes[row[0]] for row in universe}
    batches = [random_batch(rng, universe, num_workers, 12) for _ in range(40)]
    need = largest_need(batches, num_workers, lambda row: sizes[row] if unit == "bytes" else 1)
    harness = Harness(rng, [int(n * (1 + slack)) for n in need], unit, policy, sizes)
    for iteration, trainers in enumerate(batches):
        current = {
            "on-demand": trainers,
            "full": {row: who if len(who) == 1 else set() for row, who in trainers.items()},
            "any": {row: set(np.flatnonzero(rng.random(num_workers) < 0.5).tolist()) for row in trainers},
        }[sync]
        harness.step(trainers, current, window(batches, iteration, look_ahead))
    harness.check_contents()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("unit", mostly_slow(["rows", "bytes"], "bytes"))
def test_long_traces_recycle_slots_and_compact(policy, unit):
    rng = np.random.default_rng(1)
    universe = [(int(rng.integers(3)), key) for key in range(400)]
    sizes = {row: (8, 8, 20)[row[0]] for row in universe}
    batches = [random_batch(rng, universe, 2, 40) for _ in range(150)]
    need = max(largest_need(batches, 2, lambda row: sizes[row] if unit == "bytes" else 1))
    harness = Harness(rng, [2 * need, need], unit, policy, sizes)
    for iteration, trainers in enumerate(batches):
        harness.step(trainers, trainers, window(batches, iteration, 3))
    harness.check_contents()


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_follows_copies_and_not_uses(policy):
    """Rows change hands for ever, nothing is evicted: outdated entries must go all the same."""
    rng = np.random.default_rng(2)
    universe = [(0, key) for key in range(60)]
    harness = Harness(rng, [60, 60], "rows", policy, dict.fromkeys(universe, 4))
    taken = []
    for _ in range(150):
        trainers = {universe[i]: {int(rng.integers(2))} for i in rng.permutation(60)[:40]}
        harness.step(trainers, trainers, {})
        taken.append(harness.fast.allocated_bytes)
    assert taken[-1] == taken[30]


def test_a_cache_may_be_filled_exactly():
    rows = [(0, key) for key in range(6)]
    harness = Harness(np.random.default_rng(0), [3], "rows", "lru", dict.fromkeys(rows, 1))
    first, second = {row: {0} for row in rows[:3]}, {row: {0} for row in rows[3:]}
    assert harness.step(first, first, {}) == []
    assert harness.step(second, second, {}) == [(0, row) for row in rows[:3]]
    assert harness.fast.used.tolist() == [3]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_that_does_not_fit_changes_nothing(policy):
    rows = [(0, key) for key in range(2000)]
    harness = Harness(np.random.default_rng(0), [2000, 1000], "rows", policy, dict.fromkeys(rows, 1))
    some = {row: {0, 1} for row in rows[:900]}
    harness.step(some, some, {})
    for row in rows:
        harness.slot(row)
    before = pickle.dumps(harness.fast)
    harness.iteration += 1
    with pytest.raises(
        ConfigError, match=r"worker 1 needs 1,204 rows in one batch, but its cache holds 1,000: give .* 1,204"
    ):
        harness.fast_step({row: {1} for row in rows[:1204]}, {row: {1} for row in rows[:1204]}, {})
    assert pickle.dumps(harness.fast) == before


def test_bytes_are_named_when_a_batch_does_not_fit():
    harness = Harness(np.random.default_rng(0), [100], "bytes", "lru", {(0, 0): 64, (0, 1): 64})
    harness.iteration = 0
    with pytest.raises(ConfigError, match="worker 0 needs 128 bytes in one batch, but its cache holds 100"):
        harness.fast_step({(0, 0): {0}, (0, 1): {0}}, {(0, 0): {0}, (0, 1): {0}}, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([10], "rows", "mru"), "unknown cache policy 'mru'; known are belady, emark, lfu, lru"),
        (([10], "rows", "lru:3"), "only the keys latest, mark, frequency of emark"),
        (([10], "rows", "emark:mark,latest"), "only the keys latest, mark, frequency of emark"),
        (([10], "rows", "emark:"), "only the keys latest, mark, frequency of emark"),
    ],
)
def test_what_cannot_be_a_cache_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Caches(*arguments)
