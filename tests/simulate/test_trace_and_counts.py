"""Counting rows, remembering a trace, and following a time budget."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rowhaul.schedule import IdBatch
from rowhaul.simulate.measure import OBSERVED_DECISIONS, DecisionBudget
from rowhaul.simulate.trace import RememberedTrace, RowCounter


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(-3, 3))), max_size=12), st.integers(0, 9))
def test_counting_equals_a_dictionary(pieces, num_hot):
    counter, counts = RowCounter(3), {}
    for number, (table, keys) in enumerate(pieces):
        counter.add(table, np.array(keys, np.int64))
        for key in keys:
            counts[table, key] = counts.get((table, key), 0) + 1
        if number % 3 == 0:
            counter.num_distinct()  # looking does not disturb
    assert counter.num_distinct().tolist() == [sum(table == t for t, _ in counts) for table in range(3)]
    hot = counter.most_frequent(num_hot)
    best = sorted(counts, key=lambda row: (-counts[row], row))[:num_hot]
    assert list(zip(hot.tables.tolist(), hot.keys.tolist(), strict=True)) == sorted(best)


def id_batch(keys):
    return IdBatch.from_features([0], np.array(keys, np.int64), np.ones((1, len(keys)), np.int32))


def test_a_trace_is_read_once_if_it_fits():
    reads = []

    def read():
        reads.append(True)
        return iter([id_batch([1, 2]), id_batch([3])])

    remembered = RememberedTrace(read)
    for _ in range(3):
        assert [batch.keys.tolist() for batch in remembered()] == [[1, 2], [3]]
    assert len(reads) == 1
    again = RememberedTrace(read, limit=50)
    for _ in range(2):
        assert [batch.keys.tolist() for batch in again()] == [[1, 2], [3]]
    assert len(reads) == 4


def scored_after(budget, seconds_per_table, rounds, scored):
    """The number of tables scored once decisions take that long per table."""
    for _ in range(rounds * OBSERVED_DECISIONS):
        changed = budget.observe(scored * seconds_per_table)
        scored = scored if changed is None else changed
    return scored


def test_the_budget_settles_at_as_many_tables_as_fit():
    budget = DecisionBudget("tables_scored", 20, 20, budget_seconds=1.0)
    scored = scored_after(budget, 0.1, 10, 20)
    assert 8 <= scored <= 10
    scored = scored_after(budget, 0.01, 20, scored)
    assert scored == 20
    assert scored_after(budget, 10.0, 5, scored) == 0
