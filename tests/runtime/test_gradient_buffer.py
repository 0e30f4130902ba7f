"""A gradient buffer's index against a plain dict under random insertions and removals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.runtime.gradient_buffer import GradientBuffer
from rowhaul.store.keyed import find_or_add, locate

NUM_TABLES = 3
SOME_ROWS = st.sets(st.tuples(st.integers(0, NUM_TABLES - 1), st.integers(-(2**63), 2**63 - 1)), max_size=40)


def by_table(rows):
    """Keys table by table, and where each table begins."""
    ordered = sorted(rows)
    tables = np.array([table for table, _ in ordered], np.int64)
    keys = np.array([key for _, key in ordered], np.int64)
    return tables, keys, np.searchsorted(tables, np.arange(NUM_TABLES + 1))


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), SOME_ROWS), max_size=12), st.integers(0, 900))
def test_a_buffer_holds_what_was_put_and_not_taken(changes, more):
    buffer, expected = GradientBuffer(NUM_TABLES, 2, "float32"), {}
    crowd = {(number % NUM_TABLES, number * number) for number in range(more)}  # so that it has to grow
    for puts, rows in [(True, crowd), *changes, (False, crowd)]:
        chosen = rows if puts else rows & expected.keys()
        tables, keys, starts = by_table(chosen)
        if puts:
            locations, added = find_or_add(buffer, keys, starts)
            named = list(zip(tables.tolist(), keys.tolist(), strict=True))
            assert {named[i] for i in added} == chosen - expected.keys()
            expected.update(zip(named, locations.tolist(), strict=True))
        else:
            taken = buffer.index.delete(keys, starts)
            named = zip(tables.tolist(), keys.tolist(), strict=True)
            assert taken.tolist() == [expected.pop(row) for row in named]
            buffer.arena.release(taken)
        tables, keys, _ = by_table(expected | dict.fromkeys(rows))
        found = [expected.get(row, -1) for row in zip(tables.tolist(), keys.tolist(), strict=True)]
        assert locate(buffer, tables, keys).tolist() == found
        assert len(buffer.index) == buffer.index.num_keys.sum() == len(expected)
        assert len(set(expected.values())) == len(expected), "two rows in one place"
    for table in range(NUM_TABLES):
        ((keys, locations),) = buffer.index.blocks(table)
        held = {(table, key): at for key, at in zip(keys.tolist(), locations.tolist(), strict=True)}
        assert held == {row: at for row, at in expected.items() if row[0] == table}


def test_a_failed_delete_removes_nothing():
    buffer = GradientBuffer(1, 2, "float32")
    find_or_add(buffer, np.array([1, 2]), np.array([0, 2]))
    with pytest.raises(KeyError, match="3"):
        buffer.index.delete(np.array([1, 3]), np.array([0, 2]))
    assert len(buffer.index) == 2
