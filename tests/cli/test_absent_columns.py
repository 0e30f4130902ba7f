"""Data without some of the columns can be scored, as if they were there and empty."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def scores_of(path):
    return pq.read_table(path)["score"].to_pylist()


def test_absent_columns_read_as_missing(rowhaul, trained, log_folder, tmp_path):
    whole = pq.read_table(log_folder / "part-0.parquet").slice(0, 300)
    lacking, empty = tmp_path / "lacking.parquet", tmp_path / "empty.parquet"
    pq.write_table(whole.drop_columns(["item", "price", "click"]), lacking)
    for name in ("item", "price"):
        at = whole.column_names.index(name)
        nulls = pa.nulls(len(whole), whole.schema.field(name).type)
        whole = whole.set_column(at, name, nulls)
    pq.write_table(whole, empty)
    code, _, err = rowhaul("predict", trained, "--data", lacking, "--out", tmp_path / "a.parquet")
    assert code == 2
    assert "no column" in err
    assert "--fill-absent" in err
    filled = ("--data", lacking, "--out", tmp_path / "a.parquet", "--fill-absent")
    assert rowhaul("predict", trained, *filled)[0] == 0
    assert rowhaul("predict", trained, "--data", empty, "--out", tmp_path / "b.parquet")[0] == 0
    assert scores_of(tmp_path / "a.parquet") == scores_of(tmp_path / "b.parquet")


@pytest.mark.parametrize("options", [(), ("--fill-absent",)])
def test_what_is_no_parquet_file_is_named(options, rowhaul, trained, tmp_path):
    (tmp_path / "notes.txt").write_text("not a table")
    given = ("--data", tmp_path / "notes.txt", "--out", tmp_path / "scores.csv")
    code, _, err = rowhaul("predict", trained, *given, *options)
    assert code == 2
    assert "notes.txt: a raw log, not a Parquet file" in err
