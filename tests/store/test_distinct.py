"""Batches whose rows are known: the same as looking every id up, or no answer at all."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.store.distinct import KnownRows, match_keys


def known_rows(random, rows):
    """Distinct rows (table, key), table by table, in some other order of their own."""
    tables = np.array([table for table, _ in rows], np.int64)
    keys = np.array([key for _, key in rows], np.int64)
    order = random.permutation(len(rows))
    shuffled, shuffled_tables = np.empty_like(keys), np.empty_like(tables)
    shuffled[order], shuffled_tables[order] = keys, tables
    starts = np.searchsorted(tables, np.arange(4))
    return KnownRows(shuffled, shuffled_tables, random.permutation(len(rows)), order, keys, starts)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["same", "one more id", "one row too many"]))
def test_every_id_is_matched_with_its_row_or_the_batch_is_another_one(seed, case):
    random = np.random.default_rng(seed)
    feature_tables = np.array([0, 0, 2])
    counts = random.integers(0, 12, 3)
    values = random.choice([-(2**63), -1, 0, 1, 2**63 - 1, *range(2, 20)], counts.sum()).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    table_of_id = np.repeat(feature_tables, counts)
    rows = sorted(set(zip(table_of_id.tolist(), values.tolist(), strict=True)))
    if case == "one more id" and len(values):
        dropped = rows.pop(int(random.integers(len(rows))))
        assert dropped not in rows
    elif case == "one row too many":
        rows = sorted({*rows, (1, 5)})
    known = known_rows(random, rows)
    found = match_keys(known, values, starts, feature_tables, np.empty((0, 4), np.float32))
    if case != "same" and not (case == "one more id" and not len(values)):
        assert found is None
        return
    assert found is not None
    assert found.keys is known.keys
    assert found.keys[found.inverse].tolist() == values.tolist()
    assert found.tables[found.inverse].tolist() == table_of_id.tolist()
