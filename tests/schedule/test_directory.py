import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.schedule.batch import IdBatch
from rowhaul.schedule.directory import Directory
from rowhaul.schedule.directory.seen import SeenRows
from rowhaul.schedule.directory.slots import NEVER
from rowhaul.schedule.lifetimes import Lifetimes, RowPolicy
from rowhaul.schedule.row_states import State

KEYS = st.one_of(st.integers(-3, 3), st.sampled_from([-(2**63), 2**63 - 1, 2**32, -(2**32)]))
ROWS = st.tuples(st.integers(0, 2), KEYS)


def id_batch(samples):
    return IdBatch(
        np.cumsum([0, *map(len, samples)]),
        np.array([table for sample in samples for table, _ in sample], np.int32),
        np.array([key for sample in samples for _, key in sample], np.int64),
    )


def names(directory, slots):
    records = directory.slots[slots]
    return list(zip(records["table"].tolist(), records["key"].tolist(), strict=True))


@settings(max_examples=100)
@given(st.lists(st.lists(st.lists(ROWS, max_size=4), max_size=4), min_size=1, max_size=6))
def test_rows_are_found_again_sorted_and_counted_once_per_sample(stream):
    directory = Directory(first_touch=True)
    last_batch = {}
    for number, samples in enumerate(stream):
        batch, previous = directory.locate(number, id_batch(samples))
        rows = names(directory, batch.slots)
        assert rows == sorted({row for sample in samples for row in sample})
        for i, sample in enumerate(samples):
            offsets, named = batch.by_sample
            mine = named[offsets[i] : offsets[i + 1]]
            assert [rows[r] for r in mine] == list(dict.fromkeys(sample))
        assert batch.occurrences.tolist() == [sum(row in sample for sample in samples) for row in rows]
        assert previous[0].tolist() == [last_batch.get(row, (NEVER, 0))[0] for row in rows]
        for r, row in enumerate(rows):
            if row in last_batch:
                assert previous[1][r] == last_batch[row][1]
            last_batch[row] = (number, r)
    assert directory.num_rows == len(last_batch)


@settings(max_examples=100)
@given(st.lists(st.lists(ROWS, min_size=1, max_size=8), min_size=1, max_size=12))
def test_slots_given_back_leave_the_index_whole(stream):
    directory = Directory(first_touch=False)
    alive = {}
    for number, rows in enumerate(stream):
        batch, _ = directory.locate(number, id_batch([rows]))
        here = names(directory, batch.slots)
        for row, slot in zip(here, batch.slots.tolist(), strict=True):
            assert alive.setdefault(row, slot) == slot, "a row keeps its slot while it is known"
        directory.slots["window"][batch.slots] = 0
        leaving = batch.slots[::2]
        directory.release(np.concatenate([leaving, leaving]))
        for row in here[::2]:
            del alive[row]
    assert directory.num_rows == len(alive)
    assert names(directory, np.array(list(alive.values()), np.int32)) == list(alive)


def test_a_row_in_the_window_or_a_cache_keeps_its_slot():
    directory = Directory(first_touch=False)
    batch, _ = directory.locate(0, id_batch([[(0, 1), (0, 2)]]))
    directory.release(batch.slots)
    assert directory.num_rows == 2
    directory.slots["window"][batch.slots] = 0
    directory.slots["head"][batch.slots[0]] = 5
    directory.release(batch.slots)
    assert names(directory, batch.slots[:1]) == [(0, 1)]
    assert directory.num_rows == 1


def test_rows_are_fresh_until_trained_and_never_again():
    directory = Directory(first_touch=True)
    batch, _ = directory.locate(0, id_batch([[(0, 1)]]))
    assert directory.slots["state"][batch.slots] == [State.FRESH]
    directory.remember_trained(batch, np.array([0], np.int32))
    directory.slots["window"][batch.slots] = 0
    directory.release(batch.slots)
    batch, _ = directory.locate(1, id_batch([[(0, 1), (1, 1)]]))
    assert directory.slots["state"][batch.slots].tolist() == [State.HOME, State.FRESH]


def test_rows_are_admitted_when_samples_have_named_them_often_enough():
    directory = Directory(first_touch=True, lifetimes=Lifetimes([RowPolicy(3)]))
    states = []
    for number, samples in enumerate([[[(0, 1)], [(0, 1), (0, 1)]], [[(0, 2)]], [[(0, 1)]], [[(0, 1)]]]):
        batch, _ = directory.locate(number, id_batch(samples))
        directory.admit(batch)
        states.append(State(directory.slots["state"][batch.slots[0]]))
        directory.slots["window"][batch.slots] = 0
        directory.release(batch.slots)
    assert states == [State.NOT_ADMITTED, State.NOT_ADMITTED, State.FRESH, State.HOME]


def test_the_filter_forgets_nothing_and_seldom_errs():
    rng = np.random.default_rng(0)
    seen = SeenRows()
    keys = rng.integers(-(2**62), 2**62, 200_000)
    tables = rng.integers(0, 3, len(keys)).astype(np.int32)
    for start in range(0, len(keys), 7_001):
        seen.add(tables[start : start + 7_001], keys[start : start + 7_001])
    seen.add(tables[:50_000], keys[:50_000])
    assert seen.contains(tables, keys).all()
    assert seen.memory_bytes / len(keys) <= 4
    assert seen.contains(tables, keys + 1).mean() < 0.02
    assert seen.contains((tables + 3).astype(np.int32), keys).mean() < 0.02
