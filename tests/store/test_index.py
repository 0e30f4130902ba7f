"""The index against plain dictionaries, with the keys that break hash tables."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rowhaul.store.index import KeyIndex
from rowhaul.store.kernels import SHARD_BITS, mix

NUM_TABLES = 3
EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**32]
keys_strategy = st.lists(
    st.one_of(st.sampled_from(EXTREMES), st.integers(0, 40), st.integers(-(2**63), 2**63 - 1)),
    max_size=40,
    unique=True,
)


class IndexMachine(RuleBasedStateMachine):
    """Random finds, inserts and deletes over several tables at once."""

    def __init__(self):
        super().__init__()
        self.index = KeyIndex(NUM_TABLES)
        self.expected = [{} for _ in range(NUM_TABLES)]
        self.next_record = 0

    def batch(self, by_table):
        starts = np.cumsum([0, *map(len, by_table)]).astype(np.int64)
        return np.array([key for keys in by_table for key in keys], dtype=np.int64), starts

    @rule(by_table=st.tuples(*[keys_strategy] * NUM_TABLES))
    def insert(self, by_table):
        keys, starts = self.batch(by_table)
        locations, num_absent = self.index.find(keys, starts)
        records = np.arange(self.next_record, self.next_record + num_absent.sum())
        self.next_record += len(records)
        absent = self.index.insert(keys, starts, locations, num_absent, records)
        np.testing.assert_array_equal(locations[absent], records)
        at = 0
        for table, table_keys in enumerate(by_table):
            for key in table_keys:
                self.expected[table].setdefault(key, int(locations[at]))
                assert self.expected[table][key] == locations[at]
                at += 1

    @rule(data=st.data())
    def delete(self, data):
        by_table = [
            data.draw(st.lists(st.sampled_from(sorted(known)), unique=True)) if known else []
            for known in self.expected
        ]
        locations = self.index.delete(*self.batch(by_table))
        gone = [self.expected[table].pop(key) for table, keys in enumerate(by_table) for key in keys]
        assert locations.tolist() == gone

    @rule(by_table=st.tuples(*[keys_strategy] * NUM_TABLES))
    def find(self, by_table):
        locations, num_absent = self.index.find(*self.batch(by_table))
        expected = [self.expected[t].get(key, -1) for t, keys in enumerate(by_table) for key in keys]
        assert locations.tolist() == expected
        assert num_absent.sum() == expected.count(-1)

    @invariant()
    def blocks_hold_everything_once(self):
        for table, expected in enumerate(self.expected):
            found = [
                (int(key), int(location))
                for keys, locations in self.index.blocks(table)
                for key, location in zip(keys, locations, strict=True)
            ]
            assert sorted(found) == sorted(expected.items())
            assert self.index.num_keys[table] == len(expected)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


def test_keys_that_all_fall_into_one_shard():
    """Adversarial keys make the index slow, never wrong."""
    candidates = np.arange(50_000, dtype=np.int64)
    with np.errstate(over="ignore"):
        hashed = mix(candidates.astype(np.uint64))
    keys = candidates[(hashed >> np.uint64(64 - SHARD_BITS)) == 5]
    index, starts = KeyIndex(1), np.array([0, len(keys)])
    locations, num_absent = index.find(keys, starts)
    assert np.count_nonzero(num_absent) == 1
    index.insert(keys, starts, locations, num_absent, np.arange(len(keys)))
    np.testing.assert_array_equal(index.find(keys, starts)[0], np.arange(len(keys)))


def test_deleting_an_absent_key_is_an_error_and_changes_nothing():
    index, keys, starts = KeyIndex(1), np.array([1, 2]), np.array([0, 2])
    locations, num_absent = index.find(keys, starts)
    index.insert(keys, starts, locations, num_absent, np.array([10, 11]))
    with pytest.raises(KeyError, match="3"):
        index.delete(np.array([1, 3]), starts)
    np.testing.assert_array_equal(index.find(keys, starts)[0], [10, 11])


def test_slots_of_deleted_keys_are_reclaimed():
    """Keys that come and go for ever do not make the index grow for ever."""
    index, starts = KeyIndex(1), np.array([0, 100])
    for generation in range(200):
        keys = np.arange(100) + 100 * generation
        locations, num_absent = index.find(keys, starts)
        index.insert(keys, starts, locations, num_absent, np.arange(100))
        index.delete(keys, starts)
    assert index.allocated_bytes < 100_000
