"""CSV columns of integers are integers, others text; what a column was is kept, whatever it is stored as."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowhaul.data.keys import hash_string
from rowhaul.data.preparing import prepare
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import DataError

SCHEMA = {"label": "y", "ids": ["a"]}


def prepared(tmp_path, rows, schema=SCHEMA, name="data", **options):
    """Prepare a CSV of labels and ids; returns the report."""
    path = tmp_path / f"{name}.csv"
    text = rows if isinstance(rows, bytes) else "".join(["y,a\n", *(f"1,{row}\n" for row in rows)]).encode()
    path.write_bytes(text)
    given = Schema.from_dict(schema)
    return prepare(path, tmp_path / name, "csv", schema=given, test_share=0, **options)


def keys(folder):
    return pq.read_table(folder / "part-00000.parquet")["a"].to_pylist()


@pytest.mark.parametrize(
    ("rows", "type", "expected"),
    [
        (["7", "-12", ""], "integer", [7, -12, None]),
        ([" 7 ", "9223372036854775807"], "integer", [7, 2**63 - 1]),
        (["007", "7"], "string", [hash_string("007"), hash_string("7")]),
        (["+7", "7"], "string", [hash_string("+7"), hash_string("7")]),
        (["-0"], "string", [hash_string("-0")]),
        (["12", "abc"], "string", [hash_string("12"), hash_string("abc")]),
        (["9223372036854775808"], "string", [hash_string("9223372036854775808")]),
        (["12.0"], "string", [hash_string("12.0")]),
        (["-"], "string", [hash_string("-")]),
        (["0", "10"], "integer", [0, 10]),
    ],
)
def test_a_column_of_plain_integers_is_one_of_integers(rows, type, expected, tmp_path):
    report = prepared(tmp_path, rows)
    assert report.guessed_types == {"a": type}
    assert keys(tmp_path / "data") == expected
    assert Schema.read(tmp_path / "data" / "schema.yaml").ids[0].type == type
    kind = {"integer": "integer", "string": "text"}[type]
    assert SampleStream(tmp_path / "data", Schema.from_dict(SCHEMA), 10).key_kinds == {"a": kind}


def test_lists_are_guessed_by_their_pieces(tmp_path):
    schema = {"label": "y", "ids": [{"name": "a", "separator": "|"}]}
    assert prepared(tmp_path, ["1|2", "3"], schema).guessed_types == {"a": "integer"}
    assert prepared(tmp_path, ["1|2", "3|x"], schema, "more").guessed_types == {"a": "string"}


def test_the_type_can_be_chosen(tmp_path):
    schema = {"label": "y", "ids": [{"name": "a", "type": "string"}]}
    assert prepared(tmp_path, ["7"], schema).guessed_types == {}
    assert keys(tmp_path / "data") == [hash_string("7")]


@pytest.mark.parametrize("late", ["abc", "007", "9223372036854775808"])
@pytest.mark.parametrize("on_bad_line", ["error", "skip"])
def test_a_late_contradiction_is_an_error_with_its_line(late, on_bad_line, tmp_path):
    rows = [str(n) for n in range(70_000)]
    rows[69_000] = late
    with pytest.raises(DataError, match=rf"data.csv, line 69,002: column a: '{late}' is not a plain integer"):
        prepared(tmp_path, rows, on_bad_line=on_bad_line)
    report = prepared(tmp_path, rows, {"label": "y", "ids": [{"name": "a", "type": "string"}]})
    assert report.rows == 70_000


def test_the_first_rows_of_every_file_count(tmp_path):
    for name, row in (("one", "7"), ("two", "x")):
        (tmp_path / f"{name}.csv").write_text(f"y,a\n1,{row}\n")
    both = [tmp_path / "one.csv", tmp_path / "two.csv"]
    prepare(both, tmp_path / "data", "csv", schema=Schema.from_dict(SCHEMA), test_share=0)
    assert keys(tmp_path / "data") == [hash_string("7"), hash_string("x")]


def test_files_of_different_kinds_are_refused_together(tmp_path):
    prepared(tmp_path, ["7"], name="integers")
    prepared(tmp_path, ["x"], name="texts")
    with pytest.raises(DataError, match=r"'a' holds integer ids in .* but text ids in"):
        SampleStream([tmp_path / "integers", tmp_path / "texts"], Schema.from_dict(SCHEMA), 10)


def without_notes(folder):
    """Make a data folder what an earlier version wrote."""
    for path in folder.glob("*.parquet"):
        pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    Schema.from_dict(SCHEMA).write(folder / "schema.yaml")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["made_by"].pop("id_types", None)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_data_of_earlier_versions_keeps_its_meaning(tmp_path):
    prepared(tmp_path, ["x"])
    folder = tmp_path / "data"
    without_notes(folder)
    assert SampleStream(folder, Schema.from_dict(SCHEMA), 10).key_kinds == {"a": "text"}
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["made_by"]["format"] = "parquet"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert SampleStream(folder, Schema.from_dict(SCHEMA), 10).key_kinds == {"a": "int64"}
    pq.write_table(pa.table({"y": [1], "a": [7]}), folder / "mine.parquet")  # not written by prepare
    assert SampleStream(folder / "mine.parquet", Schema.from_dict(SCHEMA), 10).key_kinds == {"a": "integer"}


def test_prepared_parquet_keeps_what_it_was(tmp_path):
    prepared(tmp_path, ["x"])
    part, schema = tmp_path / "data" / "part-00000.parquet", Schema.from_dict(SCHEMA)
    prepare(part, tmp_path / "again", "parquet", schema=schema, test_share=0)
    assert SampleStream(tmp_path / "again", schema, 10).key_kinds == {"a": "text"}
    pq.write_table(pa.table({"y": [1], "a": [16]}), tmp_path / "mine.parquet")
    hex_ids = Schema.from_dict({"label": "y", "ids": [{"name": "a", "type": "hex"}]})
    prepare(tmp_path / "mine.parquet", tmp_path / "hex", "parquet", schema=hex_ids, test_share=0)
    assert SampleStream(tmp_path / "hex", schema, 10).key_kinds == {"a": "hex"}
    text = Schema.from_dict({"label": "y", "ids": [{"name": "a", "type": "string"}]})
    with pytest.raises(DataError, match="says `type: string` of id column 'a', which holds integer ids"):
        prepare(tmp_path / "mine.parquet", tmp_path / "text", "parquet", schema=text, test_share=0)


LATIN = "y,a\n1,café\n1,tea\n".encode("latin-1")


def test_text_that_is_not_utf8_is_a_bad_line(tmp_path):
    with pytest.raises(DataError, match=r"data.csv, line 2: column a: 'caf�' is not valid utf-8"):
        prepared(tmp_path, LATIN)
    report = prepared(tmp_path, LATIN, on_bad_line="skip")
    assert (report.rows, report.bad_lines) == (1, 1)
    assert keys(tmp_path / "data") == [hash_string("tea")]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-8-sig"])
def test_an_encoding_can_be_named(encoding, tmp_path):
    text = "y,a,número\n1,café,1\n1,日本,2\n" if "utf" in encoding else "y,a,número\n1,café,1\n1,x,2\n"
    schema = {"label": "y", "ids": ["a", "número"], "csv": {"encoding": encoding}}
    prepared(tmp_path, text.encode(encoding), schema)
    last = "日本" if "utf" in encoding else "x"
    assert keys(tmp_path / "data") == [hash_string("café"), hash_string(last)]


def test_what_an_encoding_cannot_say_is_a_bad_line(tmp_path):
    schema = {**SCHEMA, "csv": {"encoding": "cp1252"}}
    report = prepared(tmp_path, b"y,a\n1,ok\n1,b\x81d\n1,fine\n", schema, on_bad_line="skip")
    assert (report.rows, report.bad_lines) == (2, 1)
    assert "is not valid cp1252" in report.bad_line_examples[0]


def test_columns_whose_names_are_not_utf8(tmp_path):
    with pytest.raises(DataError, match="line 1: the names of the columns are not valid utf-8"):
        prepared(tmp_path, "y,a,número\n1,2,3\n".encode("latin-1"))


@pytest.mark.parametrize("encoding", ["latin-99", "base64"])
def test_unknown_encodings_are_refused(encoding):
    with pytest.raises(DataError, match=f"encoding '{encoding}' is not known"):
        Schema.from_dict({**SCHEMA, "csv": {"encoding": encoding}})


def test_bad_bytes_are_found_wherever_blocks_end(tmp_path):
    """Characters that two blocks of the reader share, and a bad one after megabytes of good ones."""
    rows = ["é" * 61] * 20_000
    text = "".join(["y,a\n", *(f"1,{row}\n" for row in rows)]).encode() + b"1,caf\xe9\n"
    report = prepared(tmp_path, text, on_bad_line="skip")
    assert (report.rows, report.bad_lines) == (20_000, 1)
    assert set(keys(tmp_path / "data")) == {hash_string("é" * 61)}
