"""The index in several threads: nothing is lost, nothing is given out twice, nobody reads nonsense."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rowhaul.store import shard_memory
from rowhaul.store.arena import RecordArena
from rowhaul.store.index import KeyIndex

NUM_TABLES = 3


def batch_of(rng, num_keys, key_range):
    """Keys of all tables, some of them twice."""
    tables = np.sort(rng.integers(0, NUM_TABLES, num_keys))
    return rng.integers(0, key_range, num_keys), np.searchsorted(tables, np.arange(NUM_TABLES + 1)), tables


def in_threads(*functions):
    """Run them at once; the first exception of any is raised."""
    barrier = threading.Barrier(len(functions))

    def begin(function):
        barrier.wait(10)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(60) for future in [pool.submit(begin, one) for one in functions]]


def contents(index):
    return {
        (table, key): location
        for table in range(index.num_tables)
        for keys, locations in index.blocks(table)
        for key, location in zip(keys.tolist(), locations.tolist(), strict=True)
    }


@pytest.mark.parametrize(("num_batches", "num_keys", "key_range"), [(40, 500, 3000), (12, 4000, 2**40)])
def test_overlapping_inserts_agree(monkeypatch, num_batches, num_keys, key_range):
    """Small batches over few keys, and large ones that let shards grow; tables are split on the way."""
    monkeypatch.setattr(shard_memory, "SPLIT_KEYS", 1000)
    index, arena = KeyIndex(NUM_TABLES), RecordArena(1, np.float32)

    def insert(seed):
        rng = np.random.default_rng(seed // 2)  # two threads each want the same keys
        seen, new = {}, 0
        for _ in range(num_batches):
            keys, starts, tables = batch_of(rng, num_keys, key_range)
            locations, is_new = index.find_or_insert(
                keys, starts, lambda absent: arena.allocate(len(absent)), arena.release
            )
            new += int(is_new.sum())
            for name, location in zip(
                zip(tables.tolist(), keys.tolist(), strict=True), locations.tolist(), strict=True
            ):
                assert seen.setdefault(name, location) == location
        return seen, new

    results = in_threads(*(lambda seed=seed: insert(seed) for seed in range(4)))
    held = contents(index)
    assert {name for seen, _ in results for name in seen} == held.keys()
    assert all(held[name] == location for seen, _ in results for name, location in seen.items())
    assert sum(new for _, new in results) == len(held) == arena.num_records == index.num_keys.sum()
    assert len(set(held.values())) == len(held)


def test_lookups_beside_deletes_and_growth_see_each_key_or_none():
    """A key's location is a function of the key here, so that a reader can tell sense from nonsense."""
    index, stop = KeyIndex(NUM_TABLES), threading.Event()
    stays = np.arange(0, 60_000, 3)
    starts = np.array([0, 20_000, 20_000, 20_000])
    index.find_or_insert(stays, starts, lambda absent: stays[absent], lambda records: None)

    def come_and_go():
        rng = np.random.default_rng(1)
        for round_ in range(30):
            keys = 3 * np.unique(rng.integers(0, 40_000 * (1 + round_), 10_000)) + 1
            starts = np.array([0, len(keys), len(keys), len(keys)])
            index.find_or_insert(keys, starts, lambda absent, keys=keys: keys[absent], lambda records: None)
            if round_ % 2:
                gone = index.discard(keys, starts)
                assert ((gone == keys) | (gone == -1)).all()
        stop.set()

    def read(seed):
        rng, num_read = np.random.default_rng(seed), 0
        while not stop.is_set() or num_read == 0:
            some = rng.choice(stays, 3000)
            tables = np.zeros(len(some), np.int64)
            assert (index.find_each(tables, some) == some).all()
            others = rng.integers(0, 2**20, 3000)
            found, _ = index.find(others, np.array([0, 3000, 3000, 3000]))
            assert ((found == others) | (found == -1)).all()
            assert (found[others % 3 == 2] == -1).all()
            for keys, locations in index.blocks(0):
                assert (keys == locations).all()
            num_read += 1

    in_threads(come_and_go, lambda: read(2), lambda: read(3))
    assert {key for _, key in contents(index)} >= set(stays.tolist())


def test_a_key_deleted_by_several_threads_is_given_to_one():
    keys, starts = np.arange(20_000), np.array([0, 5000, 20_000, 20_000])
    index = KeyIndex(NUM_TABLES)
    for _ in range(5):
        index.find_or_insert(keys, starts, lambda absent: absent, lambda records: None)
        taken = in_threads(*[lambda: index.discard(keys, starts)] * 3)
        assert sorted(np.concatenate(taken)[np.concatenate(taken) >= 0].tolist()) == keys.tolist()
        assert index.num_keys.tolist() == [0, 0, 0]


def test_a_shard_that_is_busy_is_taken_later():
    """A batch does what it can while somebody holds the lock of one table, and waits for that one only."""
    index, starts = KeyIndex(NUM_TABLES), np.array([0, 5, 10, 15])
    keys = np.arange(15)  # few enough to have room
    with index._memory.locked(32):  # the second table's only shard
        thread = threading.Thread(target=index.add, args=(keys, starts, np.arange(15), np.arange(15)))
        thread.start()
        deadline = time.monotonic() + 30
        while index.num_keys[[0, 2]].tolist() != [5, 5]:
            assert time.monotonic() < deadline
        assert index.num_keys[1] == 0
        assert thread.is_alive()
    thread.join(10)
    assert index.num_keys.tolist() == [5, 5, 5]


@pytest.mark.parametrize(("split", "key_range", "num_keys"), [(10**9, 300, 100), (500, 10**5, 4000)])
def test_everything_at_once_gives_nobody_the_location_of_another_key(monkeypatch, split, key_range, num_keys):
    """Insert, discard, look up, list, reserve; few keys in tiny shards, and many in split ones."""
    monkeypatch.setattr(shard_memory, "SPLIT_KEYS", split)
    index, held = KeyIndex(NUM_TABLES), (1 << 32) - 1

    def locations(tables, keys, version):
        return tables << 56 | version << 32 | keys

    def check(tables, keys, found):
        assert ((found == -1) | ((found >> 56 == tables) & (found & held == keys))).all()

    def insert(tables, keys, starts):
        found, _ = index.find_or_insert(
            keys, starts, lambda absent: locations(tables[absent], keys[absent], 1), lambda records: None
        )
        assert (found >= 0).all()
        return found

    def look_up(tables, keys, starts):
        check(tables[::-1], keys[::-1], index.find_each(tables[::-1], keys[::-1]))
        return index.find(keys, starts)[0]

    def list_all(tables, keys, starts):
        index.reserve([num_keys * 2, 0, num_keys])
        for table in range(NUM_TABLES):
            for listed, found in index.blocks(table):
                check(np.full(len(listed), table), listed, found)
        return np.full(len(keys), -1)

    def discard(tables, keys, starts):
        return index.discard(keys, starts)

    def repeat(operation, seed):
        rng = np.random.default_rng(seed)
        for _ in range(120):
            keys, starts, tables = batch_of(rng, int(rng.integers(0, num_keys)), key_range)
            check(tables, keys, operation(tables, keys, starts))

    operations = [insert, insert, discard, look_up, list_all]
    in_threads(*(lambda one=one, seed=seed: repeat(one, seed) for seed, one in enumerate(operations)))
    assert len(contents(index)) == index.num_keys.sum()
