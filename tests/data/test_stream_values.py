"""What the columns of a Parquet file become, and which of them are refused."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowhaul.data.keys import hash_string
from rowhaul.data.samples import Samples
from rowhaul.data.schema import DenseColumn, IdColumn, LabelColumn, Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import DataError


def read(path: Path, schema: Schema, **options: bool) -> Samples:
    (batch,) = SampleStream(path, schema, 1000, **options)
    return batch


def ids_of(tmp_path: Path, column: pa.Array) -> list[list[int]]:
    """The ids that each row of one id column is read as."""
    pq.write_table(pa.table({"id": column}), tmp_path / "ids.parquet", row_group_size=2)
    batch = read(tmp_path / "ids.parquet", Schema(None, (), (IdColumn("id"),)), require_label=False)
    ends = np.cumsum(batch.lengths[0])
    assert ends[-1] == len(batch.values)
    return [part.tolist() for part in np.split(batch.values, ends[:-1])]


@pytest.mark.parametrize("kind", [pa.int64(), pa.int32(), pa.int8(), pa.uint16(), pa.uint32()])
def test_integer_ids_are_their_own_key_and_null_is_no_id(tmp_path: Path, kind: pa.DataType) -> None:
    assert ids_of(tmp_path, pa.array([5, None, 0, 7, None], kind)) == [[5], [], [0], [7], []]


def test_extreme_integers_keep_their_bits(tmp_path: Path) -> None:
    smallest, largest = -(2**63), 2**63 - 1
    assert ids_of(tmp_path, pa.array([smallest, -1, largest], pa.int64())) == [[smallest], [-1], [largest]]
    assert ids_of(tmp_path, pa.array([2**64 - 1, 2**63], pa.uint64())) == [[-1], [smallest]]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_string_ids_are_hashed_however_they_are_stored(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["a", None, "", "žluť", "a", "x" * 100]
    expected = [[] if text is None else [hash_string(text)] for text in texts]
    assert ids_of(tmp_path, pa.array(texts, pa.string()).cast(kind)) == expected


def test_bytes_hash_like_the_string_they_spell(tmp_path: Path) -> None:
    assert ids_of(tmp_path, pa.array([b"a", None], pa.binary())) == [[hash_string("a")], []]


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint64())])
def test_a_list_is_several_ids_and_its_nulls_are_none(tmp_path: Path, kind: pa.DataType) -> None:
    lists = [[1, 2, 3], [], None, [4, None], [None], [5]]
    assert ids_of(tmp_path, pa.array(lists, kind)) == [[1, 2, 3], [], [], [4], [], [5]]


def test_lists_of_strings_and_lists_of_fixed_size(tmp_path: Path) -> None:
    words = pa.array([["a", "b"], None, ["b", None]], pa.list_(pa.string()))
    a, b = hash_string("a"), hash_string("b")
    assert ids_of(tmp_path, words) == [[a, b], [], [b]]
    pairs = pa.array([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2))
    assert ids_of(tmp_path, pairs) == [[1, 2], [], [3]]


def test_a_column_of_nulls_only_has_no_ids(tmp_path: Path) -> None:
    assert ids_of(tmp_path, pa.nulls(3)) == [[], [], []]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, None, -3], pa.int64()), [1, 0, -3]),
        (pa.array([1.5, None, -3], pa.float64()), [1.5, 0, -3]),
        (pa.array(np.array([1.5, 2], np.float16)), [1.5, 2]),
        (pa.array([True, None, False]), [1, 0, 0]),
        (pa.array([Decimal("1.25"), None]), [1.25, 0]),
        (pa.array([2**24 + 1], pa.int64()), [2.0**24]),
        (pa.nulls(2), [0, 0]),
    ],
)
def test_any_number_is_dense_and_null_is_zero(
    tmp_path: Path, column: pa.Array, expected: list[float]
) -> None:
    pq.write_table(pa.table({"x": column, "id": np.arange(len(column))}), tmp_path / "a.parquet")
    schema = Schema(None, (DenseColumn("x"),), (IdColumn("id"),))
    dense = read(tmp_path / "a.parquet", schema, require_label=False).dense
    assert dense.dtype == np.float32
    assert dense[:, 0].tolist() == expected


def test_log1p_is_taken_of_the_positive_part_in_float32(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([0, 1, 1000, -5, None]), "id": range(5)})
    pq.write_table(table, tmp_path / "a.parquet")
    schema = Schema(None, (DenseColumn("x", "log1p"),), (IdColumn("id"),))
    dense = read(tmp_path / "a.parquet", schema, require_label=False).dense
    assert dense[:, 0] == pytest.approx(np.log1p([0, 1, 1000, 0, 0]), rel=1e-6)


@pytest.mark.parametrize(
    ("column", "positive_from", "expected"),
    [
        (pa.array([0, 1, 1], pa.int8()), None, [0, 1, 1]),
        (pa.array([0.0, 1.0]), None, [0, 1]),
        (pa.array([False, True]), None, [0, 1]),
        (pa.array([3.5, 4, 5, -1]), 4, [0, 1, 1, 0]),
    ],
)
def test_labels(tmp_path: Path, column: pa.Array, positive_from: float | None, expected: list[float]) -> None:
    pq.write_table(pa.table({"y": column, "id": np.arange(len(column))}), tmp_path / "a.parquet")
    labels = read(
        tmp_path / "a.parquet", Schema(LabelColumn("y", positive_from), (), (IdColumn("id"),))
    ).labels
    assert labels is not None
    assert labels.dtype == np.float32
    assert labels.tolist() == expected


def test_labels_are_left_alone_where_none_is_required(tmp_path: Path) -> None:
    pq.write_table(pa.table({"y": ["?"], "id": [1]}), tmp_path / "a.parquet")
    schema = Schema(LabelColumn("y"), (), (IdColumn("id"),))
    assert read(tmp_path / "a.parquet", schema, require_label=False).labels is None


def test_only_the_columns_of_the_schema_matter(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"user.id": [1, 2], "user": ["x", "y"], "other": [1.5, None]}), tmp_path / "a.parquet"
    )
    batch = read(tmp_path / "a.parquet", Schema(None, (), (IdColumn("user.id"),)), require_label=False)
    assert batch.values.tolist() == [1, 2]


FULL = Schema(LabelColumn("click"), (DenseColumn("price"),), (IdColumn("user"),))
GOOD = {"click": [0, 1, 0, 1, 0], "price": [1.0, 2.0, 3.0, 4.0, 5.0], "user": [1, 2, 3, 4, 5]}


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("price", pa.array([1, 2, 3, float("nan"), 5]), ["row 3", "'price'", "nan"]),
        ("price", pa.array([None, 2, 3, 4, float("-inf")]), ["row 4", "'price'", "-inf"]),
        ("price", pa.array([1, 2, 1e300, 4, 5]), ["row 2", "'price'", "1e+300", "float32"]),
        ("click", pa.array([0, 1, 2, 1, 0]), ["row 2", "'click'", "is 2", "positive_from"]),
        ("click", pa.array([0, 1, 1, None, 0]), ["row 3", "'click'", "None"]),
        ("click", pa.array([0, 0.5, 1, 1, 0]), ["row 1", "'click'", "0.5"]),
        ("click", pa.array([0, 1, 1, 1, 1e300]), ["row 4", "'click'", "1e+300"]),
        ("price", pa.array(["a"] * 5), ["'price'", "string", "numbers"]),
        ("click", pa.array(["0"] * 5), ["'click'", "string"]),
        ("user", pa.array([1.0, None, 3, 4, 5]), ["'user'", "double", "int64"]),
        ("user", pa.array([[[1]]] * 5), ["'user'", "list"]),
        ("user", pa.array([True] * 5), ["'user'", "bool"]),
    ],
)
def test_a_bad_column_or_value_is_named_with_its_file(
    tmp_path: Path, column: str, values: pa.Array, says: list[str]
) -> None:
    pq.write_table(pa.table(GOOD), tmp_path / "part-0.parquet")
    pq.write_table(pa.table({**GOOD, column: values}), tmp_path / "part-1.parquet", row_group_size=2)
    with pytest.raises(DataError) as caught:
        list(SampleStream(tmp_path, FULL, 2))
    for part in ["part-1.parquet", *says]:
        assert part in str(caught.value)


@pytest.mark.parametrize("positive_from", [None, 4.0])
def test_a_label_that_is_not_a_number_is_refused(tmp_path: Path, positive_from: float | None) -> None:
    pq.write_table(pa.table({"y": [1.0, float("nan")], "id": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 1 .*'y' is nan"):
        read(tmp_path / "a.parquet", Schema(LabelColumn("y", positive_from), (), (IdColumn("id"),)))


def test_a_missing_column_lists_those_found_and_the_nearest(tmp_path: Path) -> None:
    pq.write_table(pa.table({"click": [1], "prise": [1.0], "user": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: no column 'price' \(did you mean 'prise'\?\); .* user"):
        SampleStream(tmp_path, FULL, 2)


def test_a_schema_without_label_cannot_be_trained_on(tmp_path: Path) -> None:
    pq.write_table(pa.table(GOOD), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no label"):
        SampleStream(tmp_path, Schema(None, (), (IdColumn("user"),)), 2)


def test_one_feature_cannot_mix_integers_and_strings(tmp_path: Path) -> None:
    pq.write_table(pa.table(GOOD), tmp_path / "part-0.parquet")
    pq.write_table(pa.table({**GOOD, "user": ["1"] * 5}), tmp_path / "part-1.parquet")
    with pytest.raises(DataError, match=r"'user' holds integer ids in .*part-0.* text ids in .*part-1"):
        SampleStream(tmp_path, FULL, 2)


def test_files_without_rows_are_passed_over_unless_all_are(tmp_path: Path) -> None:
    pq.write_table(pa.table(GOOD).slice(0, 0), tmp_path / "part-0.parquet")
    with pytest.raises(DataError, match=r"no rows: .*part-0"):
        SampleStream(tmp_path, FULL, 2)
    pq.write_table(pa.table(GOOD), tmp_path / "part-1.parquet")
    assert len(read(tmp_path, FULL)) == 5


def test_a_file_that_is_no_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(GOOD), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"a\.parquet: not a whole Parquet file, truncated or damaged"):
        SampleStream(path, FULL, 2)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.parquet: the file is empty \(0 bytes\)"):
        SampleStream(path, FULL, 2)
    raw = tmp_path / "train.txt.gz"
    raw.write_bytes(b"\x1f\x8b" + bytes(100))
    with pytest.raises(DataError, match=r"train\.txt\.gz: a raw log.*rowhaul prepare"):
        SampleStream(raw, FULL, 2)


def test_a_damaged_page_is_found_by_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"id": np.arange(1000)})
    pq.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(np.arange(500, 510).tobytes()) + 8] ^= 1
    path.write_bytes(damaged)
    stream = SampleStream(path, Schema(None, (), (IdColumn("id"),)), 10, require_label=False)
    with pytest.raises(DataError, match=r"a\.parquet: not a whole Parquet file"):
        list(stream)


def test_a_file_that_goes_away_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table(GOOD), tmp_path / "a.parquet")
    stream = SampleStream(tmp_path, FULL, 2)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(DataError, match=r"a\.parquet: no such file .* must stay where it is"):
        list(stream)
