"""The distinct rows of a batch against sets and dictionaries, and what a blind dispatcher is not told."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rowhaul.schedule import CacheSettings, IdBatch, RowSizes, Scheduler, ScheduleSettings, Topology
from rowhaul.schedule.directory.by_feature import find_rows
from rowhaul.schedule.directory.distinct import (
    FEW,
    distinct_by_appearance,
    distinct_rows,
)
from rowhaul.schedule.dispatch.round_robin import RoundRobin
from rowhaul.schedule.dispatch.task import is_blind
from rowhaul.schedule.masks import trainers_of
from rowhaul.schedule.threads import Threads

KEYS = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1), st.integers(0, 500))
ROWS = st.tuples(st.integers(0, 3), KEYS)


def check(samples):
    """Compare with the obvious way: rows in a set, sorted, and each sample's in the order it names them."""
    offsets, rows, tables, keys, occurrences = distinct_rows(
        np.cumsum([0, *map(len, samples)]),
        np.array([table for sample in samples for table, _ in sample], np.int32),
        np.array([key for sample in samples for _, key in sample], np.int64),
    )
    expected = sorted({row for sample in samples for row in sample})
    assert list(zip(tables.tolist(), keys.tolist(), strict=True)) == expected
    assert occurrences.tolist() == [sum(row in sample for sample in samples) for row in expected]
    named = [[expected[r] for r in rows[offsets[i] : offsets[i + 1]]] for i in range(len(samples))]
    assert named == [list(dict.fromkeys(sample)) for sample in samples]
    assert offsets[-1] == len(rows)


@settings(max_examples=150)
@given(st.lists(st.lists(ROWS, max_size=5), max_size=6))
@example([])
@example([[]])
@example([[(3, 2**63 - 1), (3, -(2**63)), (0, -1), (3, 2**63 - 1)]])
def test_rows_of_samples_are_told_apart_and_ordered(samples):
    check(samples)


@settings(max_examples=60)
@given(st.lists(ROWS, max_size=30))
@example([])
def test_rows_by_appearance_are_counted_table_by_table(ids):
    row_of, keys, starts, counts = distinct_by_appearance(
        np.array([table for table, _ in ids], np.int32), np.array([key for _, key in ids], np.int64), 4
    )
    expected = sorted(dict.fromkeys(ids), key=lambda row: row[0])
    assert keys.tolist() == [key for _, key in expected]
    assert starts.tolist() == [sum(table < t for table, _ in expected) for t in range(5)]
    assert [expected[row] for row in row_of] == ids
    assert counts.tolist() == [ids.count(row) for row in expected]


@settings(max_examples=30)
@given(st.integers(1, 4), st.lists(KEYS, min_size=FEW, max_size=4 * FEW, unique=True))
def test_samples_whose_tables_ascend_are_counted_as_others_are(num_tables, keys):
    """One id a table, as most logs have them, takes a shorter way; many keys are sorted by another."""
    samples = [
        [(table, keys[(i * (table + 1)) % len(keys)]) for table in range(num_tables)]
        for i in range(len(keys))
    ]
    check(samples)
    check([*samples, [(0, keys[0]), (0, keys[0])]])


@settings(max_examples=60)
@given(st.integers(0, 4), st.integers(0, 3 * FEW), st.integers(0, 2**32 - 1), KEYS)
@example(3, 0, 0, 1)
def test_ids_feature_by_feature_are_those_sample_by_sample(num_features, num_samples, seed, step):
    """What a scheduler makes of features with tables of their own is what it makes of their samples."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 2, (num_features, num_samples)).astype(np.int32)
    with np.errstate(over="ignore"):
        values = random.integers(-20, 2 * FEW, int(lengths.sum())) * np.int64(step)
    tables = np.sort(random.choice(9, num_features, replace=False)).astype(np.int32)
    ids = IdBatch.from_features(tables, values, lengths)
    assert ids.by_feature.is_simple
    threads = Threads(1 + seed % 3)
    found = find_rows(ids.by_feature, threads)
    expected = distinct_rows(ids.offsets, ids.tables, ids.keys)
    given = *found.by_sample(), found.tables, found.keys, found.occurrences()
    for one, other in zip(given, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    worker = random.integers(0, 64, num_samples).astype(np.int32)
    np.testing.assert_array_equal(
        found.trainers(worker, threads), trainers_of(*expected[:2], worker, len(found.keys))
    )


@pytest.mark.parametrize(
    ("tables", "lengths"), [([0, 0], [[1], [1]]), ([1, 0], [[1], [1]]), ([0, 1], [[2], [0]])]
)
def test_features_that_share_tables_or_have_many_ids_are_not_simple(tables, lengths):
    ids = IdBatch.from_features(tables, np.array([5, 5]), np.array(lengths, np.int32))
    assert not ids.by_feature.is_simple


@pytest.mark.parametrize(
    "step",
    [
        1 << 51,  # all in the highest bytes
        -(1 << 20),
        0x9E3779B97F4A7C15,  # spread over all numbers
        pow(0x9E3779B97F4A7C15, -1, 1 << 64) << 33,  # what the hash table mixes to very few numbers
    ],
)
def test_many_keys_of_odd_shapes(step):
    keys = [(i * step + (1 << 63)) % (1 << 64) - (1 << 63) for i in range(1500)]
    check([[(1, keys[i % 1500])] for i in np.random.default_rng(0).permutation(3000)])


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 12))
def test_round_robin_deals_in_rounds(room, num_samples):
    num_samples = min(num_samples, sum(room))
    left, expected = list(room), []
    while len(expected) < num_samples:
        for worker in range(len(room)):
            if left[worker] > 0:
                left[worker] -= 1
                expected.append(worker)

    class Task:
        capacities = np.array(room, np.int64)
        num_workers = len(room)

    Task.num_samples = num_samples
    assert RoundRobin().assign(Task).tolist() == expected[:num_samples]


def test_a_dispatcher_that_says_so_is_not_told_where_rows_are():
    told = []

    class Watching:
        name = "watching"

        def __init__(self, blind):
            self.blind = blind

        def assign(self, task):
            told.append(len(task.latest))
            return np.zeros(task.num_samples, np.int32)

    ids = IdBatch.from_features([0], np.array([5, 6, 7]), np.ones((1, 3), np.int32))
    plans = []
    for blind in (True, False):
        assert is_blind(Watching(blind)) == blind
        scheduler = Scheduler(
            ScheduleSettings(
                topology=Topology(1),
                sizes=RowSizes((64,), (0,)),
                prices=(1,),
                cache=CacheSettings(4),
                dispatcher=Watching(blind),
            ),
            [ids],
        )
        scheduler.fill()
        plans.append(scheduler.plan())
    assert told == [0, 3]
    assert plans[0].digest() == plans[1].digest()
