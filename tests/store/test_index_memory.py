"""How much memory an index takes, and what happens when there is none."""

import weakref

import numpy as np
import pytest

from rowhaul.errors import ConfigError
from rowhaul.store import shard_memory
from rowhaul.store.arena import OutOfMemoryError
from rowhaul.store.index import KeyIndex


def insert(index, keys, first_location=0):
    starts = np.where(np.arange(index.num_tables + 1) > 0, len(keys), 0)
    return index.find_or_insert(keys, starts, lambda absent: absent + first_location, lambda records: None)


def test_bytes_a_key_stay_below_24_while_a_table_grows():
    """At any size from some thousands of keys on, through splitting and beyond."""
    index, keys = KeyIndex(1), np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 600_000)
    worst = 0.0
    for first in range(0, len(keys), 1500):
        insert(index, keys[first : first + 1500], first)
        num_keys = int(index.num_keys[0])
        if num_keys > 10_000:
            worst = max(worst, index.allocated_bytes / num_keys)
    assert worst <= 24


@pytest.mark.parametrize("batch", [2000, 100_000])
def test_a_large_table_that_grows_never_takes_40_bytes_a_key(monkeypatch, batch):
    """All arrays that are alive at once, replaced ones that are still referenced included."""
    index, keys = KeyIndex(1), np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 600_000)
    alive, worst, take = weakref.WeakSet(), 0.0, shard_memory._aligned

    class Counted(np.ndarray):  # arrays cannot be in a set by value
        __hash__ = object.__hash__
        __eq__ = object.__eq__

    def watched(num_words):
        nonlocal worst
        memory = take(num_words).view(Counted)
        alive.add(memory)
        num_keys = int(index.num_keys[0])
        if num_keys > 300_000:
            worst = max(worst, sum(array.nbytes for array in alive) / num_keys)
        return memory

    monkeypatch.setattr(shard_memory, "_aligned", watched)
    for first in range(0, 600_000, batch):
        insert(index, keys[first : first + batch], first)
    assert 20 < worst <= 40


def test_many_small_tables_take_little():
    """A table of ten keys takes what describes it, four kibibytes, and half a kibibyte of slots."""
    index = KeyIndex(100)
    keys = np.arange(1000)
    index.find_or_insert(keys, np.arange(101) * 10, lambda absent: absent, lambda records: None)
    assert index.allocated_bytes <= 100 * 5000


def test_reserved_room_is_not_allocated_again(monkeypatch):
    for num_keys in (10, 5000, 300_000):
        index = KeyIndex(2)
        index.reserve([num_keys, 0])
        monkeypatch.setattr(shard_memory, "_aligned", None)
        insert(index, np.random.default_rng(0).permutation(num_keys))
        monkeypatch.undo()
        assert index.num_keys.tolist() == [num_keys, 0]
    with pytest.raises(ConfigError, match="one for each of the 2 tables"):
        index.reserve([5])


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_memory_that_cannot_be_had_changes_nothing(monkeypatch, allowed):
    """Whichever of a batch's shards is the one that cannot grow."""
    index = KeyIndex(4)
    known = np.arange(40)
    starts = np.array([0, 10, 20, 30, 40])
    index.find_or_insert(known, starts, lambda absent: absent, lambda records: None)
    before = [sorted(zip(*map(np.ndarray.tolist, b), strict=True)) for t in range(4) for b in index.blocks(t)]
    left, take = allowed, shard_memory._aligned

    def failing(num_words):
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError
        return take(num_words)

    monkeypatch.setattr(shard_memory, "_aligned", failing)
    keys, returned = np.arange(4000) + 1000, []
    with pytest.raises(OutOfMemoryError, match="no memory for the index of 4,040 keys"):
        index.find_or_insert(keys, starts * 100, lambda absent: absent + 40, returned.extend)
    assert returned == list(range(40, 4040))
    after = [sorted(zip(*map(np.ndarray.tolist, b), strict=True)) for t in range(4) for b in index.blocks(t)]
    assert after == before
    assert index.find(keys, starts * 100)[1] == 4000
    with pytest.raises(OutOfMemoryError, match="no memory to reserve"):
        index.reserve([10**9] * 4)
    monkeypatch.undo()
    index.find_or_insert(keys, starts * 100, lambda absent: absent + 40, returned.extend)
    assert index.num_keys.tolist() == [1010] * 4


def test_an_allocation_that_fails_inserts_nothing():
    def refuse(absent):
        raise OutOfMemoryError("none left")

    index = KeyIndex(1)
    with pytest.raises(OutOfMemoryError, match="none left"):
        index.find_or_insert(np.arange(5), np.array([0, 5]), refuse, lambda records: None)
    assert index.num_keys.tolist() == [0]
