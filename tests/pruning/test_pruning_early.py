"""Batches whose rows were looked up early: what they find is what they would find now."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pruned_driver import Fast

from rowhaul.optim import SGD
from rowhaul.pruning import PruneSettings
from rowhaul.pruning.deciding.decision import first_by


def batches(random, count):
    for number in range(count):
        popular = np.minimum(random.geometric(0.15, size=random.integers(1, 25)), 40) + number // 4
        yield [(int(random.integers(0, 3)), int(key)) for key in popular]


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([1, 2, 5]), st.integers(1, 3))
@settings(max_examples=25)
def test_a_lookup_of_any_age_is_brought_up_to_date(seed, ahead, period, split):
    prune = PruneSettings(ratio=0.9, chunks=2, period=period, decay=0.5, enforcement=0.0)
    early, late = (Fast(prune, 4, SGD(lr=0.1), split=split) for _ in range(2))
    random = np.random.default_rng(seed)
    coming = list(batches(random, 14))
    waiting = []
    for number, batch in enumerate(coming, 1):
        while len(waiting) <= ahead and number - 1 + len(waiting) < len(coming):
            waiting.append(early.locate(coming[number - 1 + len(waiting)]))
        located, now = waiting.pop(0), late.locate(batch)
        for one, other in zip(located, now, strict=True):
            early.map.refresh(one)
            assert one.entries.tolist() == other.entries.tolist()
        rows, expected = early.read(batch, located), late.read(batch)
        assert {name: row.tobytes() for name, row in rows.items()} == {
            name: row.tobytes() for name, row in expected.items()
        }
        gradients = {name: random.normal(size=4) for name in sorted(rows)}
        early.step(gradients, 0.1, number)
        late.step(gradients, 0.1, number)


def test_entries_that_came_and_left_meanwhile_are_seen():
    fast = Fast(PruneSettings(ratio=0.9, chunks=2, period=3, decay=0.5), 4, SGD(lr=0.1), num_tables=1)
    key = [(0, 7)]
    before = fast.locate(key)[0]
    fast.read(key)
    came = fast.locate(key)[0]
    assert before.entries.tolist() == [-1]
    fast.map.refresh(before)
    assert before.entries.tolist() == came.entries.tolist() != [-1]
    fast.tables.clear()
    fast.map.refresh(came)
    assert came.entries.tolist() == [-1]


@given(st.lists(st.tuples(st.integers(-3, 0), st.integers(0, 2**63)), min_size=1, unique_by=lambda x: x[1]))
def test_the_first_of_some_are_the_beginning_of_all_in_order(pairs):
    major, minor = np.array([one for one, _ in pairs]), np.array([two for _, two in pairs], dtype=np.uint64)
    everything = np.lexsort((minor, major))
    for count in range(len(pairs) + 1):
        assert first_by(major, minor, count).tolist() == everything[:count].tolist()
