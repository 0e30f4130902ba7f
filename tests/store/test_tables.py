import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.optim import SGD
from rowhaul.store import TableGroup, TableSpec


def group(num_tables=2):
    return TableGroup([TableSpec(f"t{t}", 3, -1, 1) for t in range(num_tables)], SGD(lr=1), np.float32, 0)


feature = st.lists(st.integers(-5, 5), max_size=20)


@given(st.lists(st.tuples(st.integers(0, 2), feature), min_size=1, max_size=5))
@settings(max_examples=60)
def test_distinct_rows_in_order_of_first_appearance(features):
    """The compiled pass equals one dictionary a table."""
    features = sorted(features, key=lambda pair: pair[0])
    tables = group(3)
    values = np.array([key for _, keys in features for key in keys], dtype=np.int64)
    starts = np.cumsum([0, *(len(keys) for _, keys in features)])
    lookup = tables.lookup(values, starts, np.array([t for t, _ in features]), insert=True)
    expected = {}
    for table, keys in features:
        for key in keys:
            expected.setdefault((table, key), len(expected))
    of_table = np.repeat(np.arange(3), np.diff(lookup.starts))
    found = list(zip(of_table.tolist(), lookup.keys.tolist(), strict=True))
    assert found == list(expected)
    in_order = [expected[table, key] for table, keys in features for key in keys]
    assert lookup.inverse.tolist() == in_order


def test_tables_do_not_share_keys():
    tables = group()
    lookup = tables.lookup(np.array([7, 7]), np.array([0, 1, 2]), np.array([0, 1]), insert=True)
    first, second = tables.arena.read(lookup.locations)
    assert (first != second).all()
    assert tables.index.num_keys.tolist() == [1, 1]


def test_blocks_and_load_are_inverses():
    source, target = group(), group()
    values = np.arange(100, dtype=np.int64) ** 3
    source.lookup(values, np.array([0, 60, 100]), np.array([0, 1]), insert=True)
    for table in range(2):
        for keys, contents in source.blocks(table):
            target.load(table, keys, contents + 1)
    for table in range(2):
        before = {
            int(k): row for keys, rows in source.blocks(table) for k, row in zip(keys, rows, strict=True)
        }
        after = {
            int(k): row for keys, rows in target.blocks(table) for k, row in zip(keys, rows, strict=True)
        }
        assert before.keys() == after.keys()
        assert all((after[key] == before[key] + 1).all() for key in before)


def test_gradients_of_another_precision_step_the_rows_they_are_for():
    """Records are found by address: eight bytes a value would step others, and memory behind them."""
    keys, starts = np.arange(50), np.array([0, 50, 50])
    gradients = np.random.default_rng(0).normal(size=(1, 3))
    stepped = []
    for dtype in (np.float32, np.float64):
        tables = group()
        locations = tables.find_or_make(keys, starts)
        tables.update(locations[20:21], gradients.astype(dtype), 1.0, 1)
        stepped.append(tables.arena.read(locations))
    np.testing.assert_array_equal(stepped[0], stepped[1])
