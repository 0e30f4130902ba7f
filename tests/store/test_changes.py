"""The rows that have changed since a step, against a dictionary."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.store.changes import ChangedRows

TABLES = 3
steps = st.lists(
    st.tuples(st.integers(0, TABLES - 1), st.sets(st.integers(-5, 15), max_size=6), st.booleans()),
    max_size=20,
)


@given(steps, st.integers(0, 20))
@settings(max_examples=150)
def test_changes_are_those_of_a_dictionary(noted, asked):
    rows, expected, sealed = ChangedRows(TABLES), {}, []
    for step, (table, keys, ends) in enumerate(noted, 1):
        rows.note(step, np.full(len(keys), table), np.array(sorted(keys), np.int64))
        expected |= {(table, key): step for key in keys}
        if ends:
            sealed.append((rows.seal(), dict(expected)))
    sealed.append((rows.seal(), expected))
    for changes, then in sealed:
        found = [(table, key) for table, keys in changes.since(asked) for key in keys.tolist()]
        assert found == sorted(row for row, step in then.items() if step > asked)
    rows.forget(asked)
    found = [(table, key) for table, keys in rows.seal().since(asked) for key in keys.tolist()]
    assert found == sorted(row for row, step in expected.items() if step > asked)


def test_memory_goes_by_distinct_rows_however_many_snapshots_there_are():
    rows, keys = ChangedRows(1), np.arange(1000)
    first = rows.seal()
    for step in range(1, 101):
        rows.note(step, np.zeros_like(keys), keys + step)
        changes = rows.seal()
        rows.seal()  # as when nothing was trained since
        assert len(changes._epochs) <= 5
    assert sum(int(one.rows.index.num_keys.sum()) for one in changes._epochs) <= 1100 + 4 * 1000
    ((_, found),) = changes.since(0)
    assert found.tolist() == list(range(1, 1100))
    ((_, found),) = changes.since(50)
    assert found.tolist() == list(range(51, 1100))
    assert list(first.since(0)) == []
