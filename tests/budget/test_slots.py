"""The map of slots: against a dictionary that does the same slowly, and whatever the order of a batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from slot_oracle import SlowSeats, mix

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


def assert_same_state(one, other):
    for name, array in one.state().items():
        np.testing.assert_array_equal(array, other.state()[name], err_msg=name)


def trained_on(slots, keys, starts, accesses):
    """One batch: new ids take empty slots, all are found and counted; returns what and who was seated."""
    seated = slots.seat(slots.find(keys, starts), accesses)
    found = slots.find(keys, starts)
    slots.count(found, accesses)
    return found, seated


def drawn(seed, size, below):
    """A batch of ids of two tables."""
    random = np.random.default_rng(seed)
    return np.stack([random.integers(0, 2, size), random.integers(0, below, size)], axis=1)


ids = st.builds(drawn, st.integers(0, 1000), st.integers(1, 200), st.integers(1, 300))


@settings(max_examples=30)
@given(st.lists(ids, min_size=1, max_size=12), st.randoms())
def test_the_order_of_rows_in_a_batch_does_not_matter(batches, random):
    one, other = made(shared=0.2), made(shared=0.2)
    for number, batch in enumerate(batches):
        keys, starts, accesses = rows_of(batch, 2)
        trained_on(one, keys, starts, accesses)
        order = list(range(len(keys)))
        random.shuffle(order)
        order = sorted(order, key=lambda i: i >= starts[1])  # stable: within a table any order
        trained_on(other, keys[order], starts, accesses[order])
        if one.settings.is_stop(number + 1):
            here, there = one.change(number + 1), other.change(number + 1)
            assert all(np.array_equal(getattr(here, name), getattr(there, name)) for name in vars(here))
    assert_same_state(one, other)


@settings(max_examples=30)
@given(st.lists(ids, min_size=1, max_size=12))
def test_rows_change_hands_only_as_a_stop_says(batches):
    """A dictionary from row to owner, changed as hand-overs say, knows all rows that are ever found."""
    one = made(shared=0.2)
    alive = {(table, -1 - j) for table in range(2) for j in range(one.shared_sizes[table])}
    for number, batch in enumerate(batches):
        keys, starts, accesses = rows_of(batch, 2)
        found, seated = trained_on(one, keys, starts, accesses)
        tables = np.repeat([0, 1], np.diff(starts))
        taken = set(zip(seated.tables.tolist(), seated.slots.tolist(), strict=True))
        assert not taken & alive
        alive |= taken
        assert set(zip(tables.tolist(), found.rows.tolist(), strict=True)) <= alive
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


class Seating(RuleBasedStateMachine):
    """New ids take empty slots as `SlowSeats` says; a state is that before batches that are not counted."""

    @initialize(num_bytes=st.sampled_from([1500, 4096, 9000]))
    def begin(self, num_bytes):
        self.now, self.ahead = 0, []
        self.map = made(num_bytes=num_bytes, shared=0.2, period=3)
        self.slow = SlowSeats(self.map)

    @rule(batch=ids)
    def read_ahead(self, batch):
        keys, starts, accesses = rows_of(batch, 2)
        each = [(int(table), int(key)) for table, key in np.unique(batch, axis=0)]
        expected = self.slow.seat(dict(zip(each, accesses.tolist(), strict=True)))
        seated = self.map.seat(self.map.find(keys, starts), accesses)
        assert list(zip(seated.tables.tolist(), seated.slots.tolist(), strict=True)) == expected
        found = self.map.find(keys, starts)
        assert found.rows.tolist() == [self.slow.row(*one) for one in each]
        self.ahead.append((keys, starts, accesses, found, seated))

    @rule()
    def count_one(self):
        if self.ahead:
            _, _, accesses, found, _ = self.ahead.pop(0)
            self.map.count(found, accesses)

    @rule()
    def save_and_read_again(self):
        """What batches took that were not counted is left out, and they take the same again."""
        saved = {
            name: array.copy() for name, array in self.map.state([one[-1] for one in self.ahead]).items()
        }
        again = made(num_bytes=self.map.settings.bytes, shared=0.2, period=3)
        again.load_state(saved)
        for keys, starts, accesses, found, seated in self.ahead:
            new = again.seat(again.find(keys, starts), accesses)
            np.testing.assert_array_equal(new.slots, seated.slots)
            np.testing.assert_array_equal(again.find(keys, starts).rows, found.rows)
        assert_same_state(again, self.map)

    @rule()
    def stop(self):
        while self.ahead:
            self.count_one()
        self.now = self.map.settings.next_stop(self.now)
        self.map.change(self.now)
        self.slow.follow(self.map)


TestSeating = Seating.TestCase
TestSeating.settings = settings(max_examples=25, stateful_step_count=15)


@settings(max_examples=20)
@given(st.lists(ids, min_size=1, max_size=8))
def test_the_sketch_knows_at_least_every_read(batches):
    """Of ids without a slot, as long as nothing decays; and no more than if cells were sums."""
    one = made(num_bytes=1500, decay=1.0)
    sums, reads = np.zeros_like(one.state()["sketch"], np.int64).reshape(2, -1), {}
    for batch in batches:
        keys, starts, accesses = rows_of(batch, 2)
        found = one.find(keys, starts)
        one.count(found, accesses)
        for hashed, seen in zip(found.hashed.tolist(), accesses.tolist(), strict=True):
            reads[hashed] = reads.get(hashed, 0) + seen
            mixed = mix((hashed + 0x9E3779B97F4A7C15) % 2**64)
            for row, bits in enumerate((mixed >> 32, mixed % 2**32)):
                sums[row, bits * sums.shape[1] >> 32] += seen
    cells = one.state()["sketch"].reshape(2, -1)
    assert (cells <= sums).all()
    for hashed, seen in reads.items():
        mixed = mix((hashed + 0x9E3779B97F4A7C15) % 2**64)
        places = [bits * sums.shape[1] >> 32 for bits in (mixed >> 32, mixed % 2**32)]
        assert min(int(cells[row, place]) for row, place in enumerate(places)) >= min(seen, 255)


def test_a_large_budget_has_a_slot_for_every_id_at_once():
    one = made(num_bytes=1 << 16)
    keys, starts, accesses = rows_of(drawn(1, 900, 400), 2)
    found, seated = trained_on(one, keys, starts, accesses)
    assert (found.rows >= 0).all()
    assert len(seated.slots) == len(np.unique(found.rows)) == one.num_taken
    assert len(trained_on(one, keys, starts, accesses)[1].slots) == 0


def test_ids_read_most_have_slots():
    one = made(num_tables=1, num_bytes=20_000, period=20)
    random = np.random.default_rng(0)
    for number in range(300):
        batch = [(0, key) for key in random.zipf(1.3, 400) % 5000]
        keys, starts, accesses = rows_of(batch, 1)
        trained_on(one, keys, starts, accesses)
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
        trained_on(one, keys, starts, accesses)
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
            trained_on(each, keys, starts, accesses)
            if each.settings.is_stop(number + 1):
                each.change(number + 1)
    assert_same_state(one, other)
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


@given(
    st.integers(1, 10**5),
    st.lists(st.integers(1, 300), min_size=1, max_size=5),
    st.floats(0.01, 0.9),
)
def test_what_a_refused_budget_asks_for_is_enough_for_all_row_sizes(num_bytes, dims, shared):
    specs = [TableSpec(f"t{number}", dim, -1, 1) for number, dim in enumerate(dims)]

    def made(size):
        return SlotMaps(specs, 0, BudgetSettings(size, shared), lambda dim: 4 * dim + 4)

    try:
        made(num_bytes)
    except ConfigError as refused:
        enough = int(str(refused).split("at least ")[1].split(" ")[0].replace(",", ""))
        assert enough > num_bytes
        made(enough)


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
    batch = maps.find(keys + 100, starts, np.ones(9, np.int64), seat=True)
    assert (batch.rows >= 0).all()
    assert [len(one.slots) for one in batch.seated] == [7, 2]
    maps.load_state({name: array.copy() for name, array in maps.state([batch]).items()})
    assert (maps.find(keys + 100, starts, np.ones(9, np.int64)).rows < 0).all()
