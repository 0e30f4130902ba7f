"""Parquet input: every column type that holds labels, numbers or ids, and rows that cannot be used."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowhaul.data.formats import Options, open_format
from rowhaul.data.keys import hash_string
from rowhaul.data.preparing import prepare
from rowhaul.data.schema import Schema
from rowhaul.data.text.reader import BadLines
from rowhaul.errors import BadLineError, DataError

SCHEMA = Schema.from_dict({"label": "y", "dense": ["x"], "ids": ["a", "b"]})


@pytest.fixture
def read(tmp_path):
    def run(*tables, schema=SCHEMA, skip=False, position=None):
        paths = []
        for number, table in enumerate(tables):
            paths.append(tmp_path / f"{number}.parquet")
            pq.write_table(pa.table(table), paths[-1], row_group_size=3)
        source = open_format("parquet", paths, Options(schema=schema))
        bad_lines = BadLines(skip)
        chunks = list(source.chunks(position, bad_lines))
        return [row for chunk in chunks for row in chunk.batch.to_pylist()], bad_lines

    return run


def test_ids_of_every_type(read):
    strings = ["u", None, "é"]
    hashed = [hash_string("u"), None, hash_string("é")]
    for column, keys in (
        (pa.array(strings), hashed),
        (pa.array(strings, pa.large_string()), hashed),
        (pa.array(strings).dictionary_encode(), hashed),
        (pa.array(strings, pa.string_view()), hashed),
        (pa.array(strings, pa.binary_view()), hashed),
        (pa.array([["u", None], None, ["é"]], pa.list_(pa.string_view())), [hashed[:1], [], hashed[2:]]),
        (pa.array([1, None, -3], pa.int32()), [1, None, -3]),
        (pa.array([1, None, 2**64 - 1], pa.uint64()), [1, None, -1]),
        (pa.array([5, None, 6], pa.int16()).dictionary_encode(), [5, None, 6]),
        (pa.array([None, None, None]), [None] * 3),
        (pa.array([["u", None], None, []]), [[hash_string("u")], [], []]),
        (pa.array([[1, 2], [None], [3]], pa.large_list(pa.int64())), [[1, 2], [], [3]]),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)), [[1, 2], [], [3, 4]]),
    ):
        rows, _ = read({"y": [0, 1, 0], "x": [1.0, None, 3.0], "a": column, "b": [1, 2, 3]})
        assert [row["a"] for row in rows] == keys


@pytest.mark.parametrize(
    "other", [pa.array([5, None]), pa.nulls(2), pa.array([5, 6], pa.uint16()).dictionary_encode()]
)
@pytest.mark.parametrize("first", [True, False])
def test_a_feature_with_lists_in_one_file_has_lists_in_all(other, first, tmp_path):
    lists = [[1, 2], []]
    expected = [[] if one is None else [one] for one in other.to_pylist()]
    columns = [other, pa.array(lists)] if first else [pa.array(lists), other]
    paths = [tmp_path / f"{number}.parquet" for number in range(2)]
    for path, column in zip(paths, columns, strict=True):
        pq.write_table(pa.table({"y": [0, 1], "x": [0.0, 1.0], "a": column, "b": [1, 2]}), path)
    prepare(paths, tmp_path / "data", "parquet", schema=SCHEMA, test_share=0)
    written = pq.read_table(tmp_path / "data" / "part-00000.parquet")["a"].to_pylist()
    assert written == (expected + lists if first else lists + expected)


def test_labels_and_numbers_of_every_type(read):
    for labels in ([True, False], [1.0, 0.0], np.array([1, 0], np.uint8)):
        rows, _ = read({"y": labels, "x": np.array([7, 8], np.int64), "a": [1, 2], "b": [3, 4]})
        assert [row["y"] for row in rows] == [1, 0]
        assert [row["x"] for row in rows] == [7.0, 8.0]
    stars = Schema.from_dict({"label": {"name": "y", "positive_from": 4}, "ids": ["a"]})
    rows, _ = read({"y": [4.0, 3.9], "a": [1, 2]}, schema=stars)
    assert [row["y"] for row in rows] == [1, 0]


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("y", [0, 2], "column y: 2 is not 0 or 1"),
        ("y", [0, None], "column y: the label is missing"),
        ("x", [0.0, float("nan")], "column x: nan is not a finite float32"),
        ("x", [0.0, 1e300], "column x: 1e\\+300 is not a finite float32"),
    ],
)
def test_bad_rows_are_named_or_skipped(read, column, values, words):
    table = {"y": [0, 1], "x": [0.0, 1.0], "a": [1, 2], "b": [1, 2], column: values}
    with pytest.raises(BadLineError, match=f"line 2: {words}"):
        read(table)
    rows, bad_lines = read(table, skip=True)
    assert len(rows) == 1
    assert bad_lines.count == 1


@pytest.mark.parametrize("weight", [None, -1.0, float("nan"), float("inf")])
def test_a_weight_that_training_refuses_is_a_bad_row(read, weight):
    schema = Schema.from_dict({"label": "y", "weight": "w", "ids": ["a"]})
    table = {"y": [0, 1], "w": pa.array([0.0, weight], pa.float64()), "a": [1, 2]}
    words = "the weight is missing" if weight is None else f"{weight!r} is not a finite number, 0 or more"
    with pytest.raises(BadLineError, match=f"line 2: column w: {words}"):
        read(table, schema=schema)
    rows, bad_lines = read(table, schema=schema, skip=True)
    assert (rows, bad_lines.count) == ([{"y": 0, "w": 0.0, "a": 1}], 1)


def test_of_several_labels_one_may_be_missing(read):
    several = [{"name": "y"}, {"name": "z"}, {"name": "seconds", "kind": "number"}]
    schema = Schema.from_dict({"labels": several, "ids": ["a"]})
    nan = float("nan")
    table = {"y": [0.0, nan, 1.0], "z": [1, None, 0], "seconds": [nan, 2.5, None], "a": [1, 2, 3]}
    rows, _ = read(table, schema=schema)
    assert [[row[name] for name in ("y", "z", "seconds")] for row in rows] == [
        [0.0, 1.0, None], [None, None, 2.5], [1.0, 0.0, None],
    ]  # fmt: skip
    for name, value, words in (("y", 2.0, "2.0 is not 0 or 1"), ("seconds", -np.inf, "-inf is not a finite")):
        with pytest.raises(BadLineError, match=f"line 3: column {name}: {words}"):
            read({**table, name: [0.0, nan, value]}, schema=schema)


def test_reading_goes_on_at_a_position(read):
    tables = [{"y": [0] * 5, "x": [0.0] * 5, "a": list(range(5)), "b": [0] * 5} for _ in range(3)]
    rows, _ = read(*tables, position={"file": 1, "row": 3})
    assert [row["a"] for row in rows] == [3, 4, 0, 1, 2, 3, 4]


def test_files_that_do_not_fit(read, tmp_path):
    good = {"y": [0], "x": [0.0], "a": [1], "b": [2]}
    with pytest.raises(DataError, match="no column 'b'"):
        read({name: good[name] for name in "yxa"})
    with pytest.raises(DataError, match="which are different keys"):
        read(good, {**good, "a": ["1"]})
    pq.write_table(pa.table(good), tmp_path / "good.parquet")
    pq.write_table(pa.table({name: pa.array([], pa.int64()) for name in good}), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"empty\.parquet holds no rows"):  # before rows of others are written
        open_format("parquet", [tmp_path / f"{name}.parquet" for name in ("good", "empty")], Options(SCHEMA))
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(DataError, match=r"text.parquet: not a whole Parquet file"):
        open_format("parquet", [tmp_path / "text.parquet"], Options(schema=SCHEMA))
    with pytest.raises(DataError, match="is a folder; name the files in it"):
        open_format("parquet", [tmp_path], Options(schema=SCHEMA))
    with pytest.raises(DataError, match="no such file"):
        open_format("parquet", [tmp_path / "nothing"], Options(schema=SCHEMA))
