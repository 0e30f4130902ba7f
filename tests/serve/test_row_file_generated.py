"""Whatever keys and rows there are, the file finds those and no others: a dictionary is the oracle."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rowhaul.checkpoint.progress import Counter
from rowhaul.data.columns import offsets_of
from rowhaul.export.serving.row_file import UnknownIds, write_rows
from rowhaul.serve.row_file import RowFile
from rowhaul.serve.rows import IdBags, MappedRows, ServedFeature
from rowhaul.store import TableSpec
from rowhaul.store.served_rows import ServedRows, equal_records

KEYS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-3, 3),
    st.sampled_from([-(2**63), 2**63 - 1, 0]),
)


class Tables:
    """Tables of whole rows, as a checkpoint's reader would give them, in blocks of three."""

    def __init__(self, tables, dim, dtype):
        self._tables, self._dim, self._dtype = tables, dim, dtype

    def format(self, table):
        return self

    def served_rows(self, reader, table):
        rows, size = self._tables[table], self._dim * np.dtype(self._dtype).itemsize
        return ServedRows(
            self._dim, self._dtype, len(rows), size, lambda: self._keys(rows), lambda: self._records(rows)
        )

    def _keys(self, rows):
        for first in range(0, len(rows), 3):
            yield np.array(list(rows)[first : first + 3], np.int64)

    def _records(self, rows):
        for keys in self._keys(rows):
            yield equal_records(keys, np.array([rows[key] for key in keys.tolist()], self._dtype))


def file_of(tables, dim, dtype, folder, on_unknown="default"):
    specs = {name: TableSpec(name, dim, -0.01, 0.01) for name in tables}
    unknown = UnknownIds(on_unknown, 0, specs)
    path, count = Path(folder) / "rows.bin", Counter(1, lambda done, total: None)
    write_rows(Tables(tables, dim, dtype), list(tables), unknown, path, 1, count)
    features = [ServedFeature(name, name, place * dim) for place, name in enumerate(tables)]
    return MappedRows(RowFile(path), features, dim * len(tables))


@settings(max_examples=25)
@given(data=st.data(), dim=st.integers(1, 9), dtype=st.sampled_from(["float32", "float64"]))
def test_every_row_is_found_and_no_other(data, dim, dtype):
    numbers = st.lists(st.floats(-1e6, 1e6, width=32), min_size=dim, max_size=dim)
    tables = {
        name: data.draw(st.dictionaries(KEYS, numbers, max_size=30), label=name) for name in ("a", "größe")
    }
    bags = [data.draw(st.lists(KEYS, max_size=6), label="bag") for _ in range(4)]
    bags += [list(rows)[:5] for rows in tables.values()]  # two samples of known keys, and so three of each
    with tempfile.TemporaryDirectory() as folder:
        rows = file_of(tables, dim, dtype, folder)
        ids = np.array([key for bag in bags for key in bag], np.int64)
        offsets = offsets_of(np.array([len(bag) for bag in bags]))
        found, num_unknown = rows.pool(IdBags(ids, offsets, np.array([0, 3, 6]), 3))
    expected = np.zeros((3, 2 * dim), dtype)
    lacking = [0, 0]
    for place, bag in enumerate(bags):
        feature, sample = divmod(place, 3)
        table = tables[list(tables)[feature]]
        for key in bag:
            lacking[feature] += key not in table
            row = np.array(table.get(key, np.zeros(dim)), dtype)
            expected[sample, feature * dim : (feature + 1) * dim] += row
    assert np.array_equal(found, expected)
    assert num_unknown.tolist() == lacking


def test_threads_read_the_same(tmp_path):
    random = np.random.default_rng(0)
    keys = random.integers(-(2**63), 2**63 - 1, 5000)
    values = random.normal(size=(5000, 8)).astype(np.float32)
    rows = file_of({"t": dict(zip(keys.tolist(), values.tolist(), strict=True))}, 8, "float32", tmp_path)
    asked = [random.integers(0, 5000, 400) for _ in range(40)]

    def read(places):
        return rows.pool(IdBags(keys[places], np.arange(401), np.array([0, 400]), 400))[0]

    with ThreadPoolExecutor(8) as pool:
        for places, found in zip(asked, pool.map(read, asked), strict=True):
            assert np.array_equal(found, values[places])
