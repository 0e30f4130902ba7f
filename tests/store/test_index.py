"""The index against plain dictionaries, with the keys that break hash tables."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numba import njit

from rowhaul._scramble import unscrambled
from rowhaul.store.index import KeyIndex
from rowhaul.store.records import mix
from rowhaul.store.shard_memory import SPLIT_KEYS
from rowhaul.store.shards import MOST_SHARD_BITS, unmix
from secrets_of_positions import secret

NUM_TABLES = 3
EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**32]


@njit
def crowded(count):
    """Keys that all want the same line, the last one; the first of them looks like an empty slot."""
    keys = np.empty(count, np.int64)
    for number in range(count):
        keys[number] = np.int64(unscrambled(np.uint64(2**64 - 1) - np.uint64(number)))
    return keys


CROWDED = crowded(40).tolist()
one_key = st.one_of(
    st.sampled_from(EXTREMES),
    st.sampled_from(CROWDED),
    st.integers(0, 40),
    st.integers(-(2**63), 2**63 - 1),
)
keys_strategy = st.lists(one_key, max_size=40, unique=True)


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
        records = np.arange(self.next_record, self.next_record + num_absent)
        self.next_record += len(records)
        absent = self.index.insert(keys, starts, locations, num_absent, records)
        np.testing.assert_array_equal(locations[absent], records)
        at = 0
        for table, table_keys in enumerate(by_table):
            for key in table_keys:
                self.expected[table].setdefault(key, int(locations[at]))
                assert self.expected[table][key] == locations[at]
                at += 1

    @rule(by_table=st.tuples(*[st.lists(one_key, max_size=60)] * NUM_TABLES))
    def find_or_insert(self, by_table):
        """Keys may repeat: one of them is new, the record of the other is given back."""
        keys, starts = self.batch(by_table)
        handed_out, returned = [], []

        def allocate(absent):
            records = np.arange(self.next_record, self.next_record + len(absent))
            self.next_record += len(absent)
            handed_out.extend(records.tolist())
            return records

        locations, is_new = self.index.find_or_insert(keys, starts, allocate, returned.extend)
        assert sorted([*locations[is_new].tolist(), *returned]) == handed_out
        names = [(table, key) for table, keys in enumerate(by_table) for key in keys]
        new = [name for name, flag in zip(names, is_new, strict=True) if flag]
        assert sorted(new) == sorted({name for name in names if name[1] not in self.expected[name[0]]})
        for (table, key), location in zip(names, locations.tolist(), strict=True):
            assert self.expected[table].setdefault(key, location) == location

    @rule(data=st.data(), by_table=st.tuples(*[keys_strategy] * NUM_TABLES))
    def discard_whatever_is_there(self, data, by_table):
        keys, starts = self.batch(by_table)
        expected = [self.expected[t].get(key, -1) for t, keys in enumerate(by_table) for key in keys]
        assert self.index.discard(keys, starts).tolist() == expected
        for table, table_keys in enumerate(by_table):
            for key in table_keys:
                self.expected[table].pop(key, None)

    @rule(more=st.integers(0, 3000))
    def reserve(self, more):
        self.index.reserve([more, 0, 2 * more])

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
        assert num_absent == expected.count(-1)

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
TestIndex.settings = settings(max_examples=25, stateful_step_count=15)


def inserted(keys, index=None):
    """An index of one table that knows these keys; key ``i`` is at location ``i``."""
    index = index or KeyIndex(1)
    locations, is_new = index.find_or_insert(keys, np.array([0, len(keys)]), lambda absent: absent, no_spare)
    assert is_new.all()
    np.testing.assert_array_equal(locations, np.arange(len(keys)))
    return index


def no_spare(records):
    raise AssertionError(f"{len(records)} records came back")


def test_keys_that_all_fall_into_one_shard():
    """These can be computed: the shard grows like any other, see `tests/test_scramble.py` for the rest."""
    mixed = np.random.default_rng(0).integers(0, 1 << (64 - MOST_SHARD_BITS), 50_000, dtype=np.uint64)
    keys = unmix(np.unique(mixed | np.uint64(5 << (64 - MOST_SHARD_BITS)))).view(np.int64)
    others = np.arange(SPLIT_KEYS + 1)  # enough for the table to have several shards
    index, starts = inserted(others), np.array([0, len(keys)])
    locations, _ = index.find_or_insert(keys, starts, lambda absent: absent + len(others), no_spare)
    np.testing.assert_array_equal(locations, np.arange(len(keys)) + len(others))
    np.testing.assert_array_equal(index.find(keys, starts)[0], locations)
    assert max(len(block) for block, _ in index.blocks(0)) > len(keys)


def test_keys_that_all_want_the_same_line():
    """The last line of all, where those that find no room have nowhere to go but the end."""
    keys = np.random.default_rng(1).permutation(crowded(3000))
    index, starts = inserted(keys), np.array([0, len(keys)])
    index.delete(keys[::2].copy(), np.array([0, 1500]))
    expected = np.where(np.arange(3000) % 2, np.arange(3000), -1)
    np.testing.assert_array_equal(index.find(keys, starts)[0], expected)


def test_a_table_is_split_while_others_stay_small():
    keys = np.arange(SPLIT_KEYS * 5 // 4)
    index = KeyIndex(2)
    for first in range(0, len(keys), 50_000):
        some = np.append(keys[first : first + 50_000], first)  # the last one is of the second table
        starts = np.array([0, len(some) - 1, len(some)])
        index.find_or_insert(some, starts, lambda absent, first=first: absent + first, no_spare)
    assert [len(list(index.blocks(table))) for table in range(2)] == [1 << MOST_SHARD_BITS, 1]
    assert index.num_keys.tolist() == [len(keys), -(-len(keys) // 50_000)]
    np.testing.assert_array_equal(index.find(keys, np.array([0, len(keys), len(keys)]))[0], keys)
    found = index.find_each(np.tile([1, 0], 100), np.repeat(keys[:100], 2))
    np.testing.assert_array_equal(found[1::2], keys[:100])
    assert (found[2::2] == -1).all()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda index: pickle.loads(pickle.dumps(index))])
def test_a_copy_is_independent(copied):
    keys, starts = np.arange(5000) * 7, np.array([0, 5000])
    index = inserted(keys)
    other = copied(index)
    index.discard(keys, starts)
    np.testing.assert_array_equal(other.find(keys, starts)[0], np.arange(5000))
    assert index.find(keys, starts)[1] == 5000


def test_a_pickle_is_read_under_another_secret():
    """Processes draw their own; what one has written another may read."""
    keys = np.arange(SPLIT_KEYS + 5000) * 7
    with secret(1):
        index = inserted(keys)
        written = pickle.dumps(index)
        expected = list(index.blocks(0))
    with secret(2):
        other = pickle.loads(written)
        np.testing.assert_array_equal(other.find(keys, np.array([0, len(keys)]))[0], np.arange(len(keys)))
        for block, expected_block in zip(other.blocks(0), expected, strict=True):
            np.testing.assert_array_equal(block, expected_block)


@pytest.mark.parametrize("num_keys", [1000, SPLIT_KEYS + 5000])
def test_keys_are_listed_by_mixed_key_whatever_the_secret(num_keys):
    """The order of rows in files: what it was before there was a secret."""
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, num_keys)
    expected = keys[np.argsort(mix(keys.view(np.uint64)))]
    for number in range(3):
        with secret(number):
            index = inserted(keys)
            index.discard(keys[:100].copy(), np.array([0, 100]))
            blocks = list(index.blocks(0))
        assert len(blocks) == (1 if num_keys < SPLIT_KEYS else 1 << MOST_SHARD_BITS)
        listed = np.concatenate([block for block, _ in blocks])
        np.testing.assert_array_equal(listed, expected[~np.isin(expected, keys[:100])])
        np.testing.assert_array_equal(keys[np.concatenate([places for _, places in blocks])], listed)


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
