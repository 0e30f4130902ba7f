"""The map of slots: against a dictionary that does the same slowly, and whatever the order of a batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.budget.maps import SlotMaps
from rowhaul.budget.room import room_for
from rowhaul.budget.settings import BudgetSettings
from rowhaul.budget.slots import SlotMap
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.store import TableSpec


def made(num_tables=2, num_bytes=4096, record_bytes=36, **given):
    budget = BudgetSettings(num_bytes, **given)
    names = [f"t{number}" for number in range(num_tables)]
    return SlotMap(names, 7, budget, room_for(budget, num_bytes, record_bytes, num_tables))


def rows_of(batch, num_tables):
    """Distinct keys table by table, starts and accesses of a batch of (table, key)."""
    distinct, accesses = np.unique(np.array(batch, np.int64).reshape(-1, 2), axis=0, return_counts=True)
    starts = np.searchsorted(distinct[:, 0], np.arange(num_tables + 1))
    return np.ascontiguousarray(distinct[:, 1]), starts, accesses


def drawn(seed, size, below):
    """A batch of ids of two tables."""
    random = np.random.default_rng(seed)
    return np.stack([random.integers(0, 2, size), random.integers(0, below, size)], axis=1)


ids = st.builds(drawn, st.integers(0, 1000), st.integers(1, 200), st.integers(1, 300))


@settings(max_examples=30, deadline=None)
@given(st.lists(ids, min_size=1, max_size=12), st.randoms())
def test_the_order_of_rows_in_a_batch_does_not_matter(batches, random):
    one, other = made(shared=0.2), made(shared=0.2)
    for number, batch in enumerate(batches):
        keys, starts, accesses = rows_of(batch, 2)
        one.count(one.find(keys, starts), accesses)
        order = list(range(len(keys)))
        random.shuffle(order)
        order = sorted(order, key=lambda i: i >= starts[1])  # stable: within a table any order
        other.count(other.find(keys[order], starts), accesses[order])
        if one.settings.is_stop(number + 1):
            here, there = one.change(number + 1), other.change(number + 1)
            assert all(np.array_equal(getattr(here, name), getattr(there, name)) for name in vars(here))
    for name, array in one.state().items():
        np.testing.assert_array_equal(array, other.state()[name], err_msg=name)


@settings(max_examples=30, deadline=None)
@given(st.lists(ids, min_size=1, max_size=12))
def test_rows_change_hands_only_as_a_stop_says(batches):
    """A dictionary from row to owner, changed as hand-overs say, knows all rows that are ever found."""
    one = made(shared=0.2)
    alive = {(table, -1 - j) for table in range(2) for j in range(one.shared_sizes[table])}
    for number, batch in enumerate(batches):
        keys, starts, accesses = rows_of(batch, 2)
        found = one.find(keys, starts)
        tables = np.repeat([0, 1], np.diff(starts))
        assert set(zip(tables.tolist(), found.rows.tolist(), strict=True)) <= alive
        one.count(found, accesses)
        if not one.settings.is_stop(number + 1):
            continue
        before = dict(zip(zip(tables.tolist(), keys.tolist(), strict=True), found.rows.tolist(), strict=True))
        change = one.change(number + 1)
        gone = set(zip(change.gone_tables.tolist(), change.gone_rows.tolist(), strict=True))
        new = list(zip(change.tables.tolist(), change.rows.tolist(), strict=True))
        sources = set(zip(change.tables.tolist(), change.sources.tolist(), strict=True))
        assert gone <= alive
        assert sources <= alive  # as they were before anything changed
        assert len(set(new)) == len(new)
        assert not (set(new) & (alive - gone))
        alive = alive - gone | set(new)
        after = one.find(keys, starts).rows
        for (table, key), row in zip(before, after.tolist(), strict=True):
            if (table, row) in set(new) and (table, row) not in gone and row >= 0:
                at = new.index((table, row))
                assert before[table, key] in (change.sources[at], row)  # it reads on what it has read
    assert sum(row >= 0 for _, row in alive) == one.num_taken
    assert one.shared_sizes.sum() <= one.room.num_shared


def test_ids_read_most_have_slots():
    one = made(num_tables=1, num_bytes=20_000, period=20)
    random = np.random.default_rng(0)
    for number in range(300):
        batch = [(0, key) for key in random.zipf(1.3, 400) % 5000]
        keys, starts, accesses = rows_of(batch, 1)
        one.count(one.find(keys, starts), accesses)
        if one.settings.is_stop(number + 1):
            one.change(number + 1)
    top = np.arange(1, one.room.num_slots // 4)
    assert (one.find(top, np.array([0, len(top)])).rows >= 0).mean() > 0.97
    assert one.num_taken > 0.97 * one.room.num_slots


def test_shared_rows_follow_the_traffic_of_rare_ids():
    one = made(num_tables=2, num_bytes=40_000, shared=0.3)
    random = np.random.default_rng(0)
    for number in range(30):
        batch = [(0, key) for key in random.integers(0, 10**9, 300)] + [(1, 5)] * 10
        keys, starts, accesses = rows_of(batch, 2)
        one.count(one.find(keys, starts), accesses)
        if one.settings.is_stop(number + 1):
            one.change(number + 1)
    assert one.shared_sizes[0] > 8 * one.shared_sizes[1]


def test_a_state_goes_on_where_it_was():
    one, other = made(shared=0.2), made(shared=0.2)
    random = np.random.default_rng(1)
    for number in range(40):
        if number == 23:
            other.load_state({name: array.copy() for name, array in one.state().items()})
        batch = [(int(key) % 2, key) for key in random.zipf(1.4, 100) % 500]
        keys, starts, accesses = rows_of(batch, 2)
        for each in (one, other)[: 1 + (number >= 23)]:
            each.count(each.find(keys, starts), accesses)
            if each.settings.is_stop(number + 1):
                each.change(number + 1)
    for name, array in one.state().items():
        np.testing.assert_array_equal(array, other.state()[name], err_msg=name)
    with pytest.raises(CheckpointError, match=r"same tables, row size and prune\.budget"):
        made(num_bytes=8192).load_state(one.state())


@pytest.mark.parametrize(("num_bytes", "record_bytes"), [(3000, 36), (10_000, 136), (1 << 20, 20)])
def test_a_budget_is_kept_and_used(num_bytes, record_bytes):
    budget = BudgetSettings(num_bytes)
    room = room_for(budget, num_bytes, record_bytes, 3)
    assert 0.85 * num_bytes < room.total_bytes <= num_bytes
    assert SlotMap(["a", "b", "c"], 0, budget, room).allocated_bytes <= room.map_bytes + 100
    with pytest.raises(ConfigError, match="give at least") as refused:
        room_for(BudgetSettings(300), 300, record_bytes, 3)
    enough = int(str(refused.value).split("at least ")[1].split(" ")[0].replace(",", ""))
    room_for(BudgetSettings(enough), enough, record_bytes, 3)


@pytest.mark.parametrize("period", [1, 7, 200])
def test_stops_get_rarer(period):
    budget = BudgetSettings(1, period=period)
    stops = [step for step in range(1, 3000) if budget.is_stop(step)]
    gaps = np.diff([0, *stops])
    assert gaps[0] == 1
    assert gaps.max() == period
    assert (np.diff(gaps) >= 0).all()
    assert [budget.last_stop(stop) for stop in stops] == [0, *stops[:-1]]
    assert all(budget.next_stop(step) > step for step in range(3000))


def test_maps_of_several_row_sizes_share_the_budget():
    specs = [TableSpec(f"t{dim}", dim, -1, 1) for dim in (8, 16, 8)]
    maps = SlotMaps(specs, 0, BudgetSettings(1 << 16), lambda dim: 4 * dim + 4)
    total = sum(one.room.total_bytes for one in maps.maps)
    assert 0.9 * (1 << 16) < total <= 1 << 16
    keys, starts = np.arange(9), np.array([0, 3, 5, 9])
    batch = maps.find(keys, starts, np.ones(9, np.int64))
    maps.count(batch)
    change = maps.change(1)
    assert len(change.rows) == 9
    assert np.bincount(change.tables).tolist() == [3, 2, 4]
    assert (maps.find(keys, starts, np.ones(9, np.int64)).rows >= 0).all()
