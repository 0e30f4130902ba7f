"""Which files a name stands for, and where their schema is found."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rowhaul.data.files import expand_files, find_schema
from rowhaul.data.folder.writer import FolderWriter
from rowhaul.data.schema import IdColumn, LabelColumn, Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ConfigError, DataError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"user": [1]}), path)


def names(folder: Path, files: tuple[Path, ...]) -> list[str]:
    return [str(path.relative_to(folder)) for path in files]


def test_folders_and_globs_come_in_natural_order(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "part-10.parquet",
        "part-9.parquet",
        "part-1.parquet",
        "test/part-0.parquet",
        ".hidden.parquet",
    )
    (tmp_path / "schema.yaml").write_text("ids: [user]")
    expected = ["part-1.parquet", "part-9.parquet", "part-10.parquet"]
    assert names(tmp_path, expand_files(tmp_path)) == expected
    assert names(tmp_path, expand_files(f"{tmp_path}/*.parquet")) == expected
    assert names(tmp_path, expand_files(f"{tmp_path}/**/part-0.parquet")) == ["test/part-0.parquet"]


@pytest.mark.parametrize("sign", ["\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT THREE}"])
def test_only_ascii_digits_are_numbers(tmp_path: Path, sign: str) -> None:
    expected = ["1a1.parquet", f"1{sign}2.parquet", f"1{sign}10.parquet", "2.parquet"]
    touch(tmp_path, *expected)
    assert names(tmp_path, expand_files(tmp_path)) == expected


def test_a_stem_comes_before_the_stem_with_a_number_and_nothing_else_moves(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "clicks.parquet",
        "clicks2.parquet",
        "clicks10.parquet",
        "clicks-b.parquet",
        "clicked.parquet",
    )
    touch(tmp_path, "a/x2.parquet", "b/x.parquet", "b/x-1.parquet", "c/part-1.parquet", "c/part-12.parquet")
    touch(tmp_path, "c/part-2.parquet")
    assert names(tmp_path, expand_files(tmp_path)) == [
        "clicked.parquet",
        "clicks.parquet",
        "clicks2.parquet",
        "clicks10.parquet",
        "clicks-b.parquet",
    ]
    assert names(tmp_path, expand_files(f"{tmp_path}/*/*.parquet")) == [
        "a/x2.parquet",
        "b/x-1.parquet",
        "b/x.parquet",
        "c/part-1.parquet",
        "c/part-2.parquet",
        "c/part-12.parquet",
    ]


def test_a_list_keeps_the_order_it_was_given_in(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.parquet", "b/2.parquet", "b/1.parquet")
    given = [str(tmp_path / "b"), tmp_path / "a" / "1.parquet"]
    assert names(tmp_path, expand_files(given)) == ["b/1.parquet", "b/2.parquet", "a/1.parquet"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    touch(tmp_path, "[1].parquet", "1.parquet")
    assert names(tmp_path, expand_files(tmp_path / "[1].parquet")) == ["[1].parquet"]


def test_what_cannot_be_found_is_said_with_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=rf"'data/\*\.parquet' matches no file .*{tmp_path}"):
        expand_files("data/*.parquet")
    with pytest.raises(DataError, match=rf"no such file: data\.parquet .*{tmp_path}"):
        expand_files("data.parquet")
    with pytest.raises(DataError, match=r"empty holds no \*\.parquet"):
        expand_files("empty")
    (tmp_path / "link.parquet").symlink_to("gone.parquet")
    with pytest.raises(DataError, match=r"link\.parquet is a link to gone\.parquet, which is not there"):
        expand_files("link.parquet")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"no such file: file/a\.parquet; file is a file, not a folder"):
        expand_files("file/a.parquet")
    with pytest.raises(DataError, match="no data files"):
        expand_files([])


def test_an_unfinished_folder_is_refused_however_it_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with FolderWriter(data, Schema(None, (), (IdColumn("user"),)), {}):
        for nothing_there_yet in (data, f"{data}/*.parquet"):
            with pytest.raises(DataError, match="data is unfinished"):
                expand_files(nothing_there_yet)
        touch(data, "part-0.parquet", "test/part-0.parquet")
        for given in (data, data / "part-0.parquet", data / "test", f"{tmp_path}/*/part-0.parquet"):
            with pytest.raises(DataError, match="data is unfinished"):
                expand_files(given)


def test_a_file_is_not_read_twice_by_mistake(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet is named more than once"):
        expand_files([tmp_path, f"{tmp_path}/*.parquet"])


def test_the_schema_is_found_beside_the_files_or_above_them(tmp_path: Path) -> None:
    touch(tmp_path, "train.parquet", "test/part-0.parquet")
    schema = Schema(LabelColumn("click"), (), (IdColumn("user"),))
    schema.write(tmp_path / "schema.yaml")
    assert find_schema(tmp_path) == schema
    assert find_schema(f"{tmp_path}/test/*.parquet") == schema


def test_what_is_passed_goes_before_what_lies_on_disk(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet")
    Schema(None, (), (IdColumn("user"),)).write(tmp_path / "schema.yaml")
    other = Schema(LabelColumn("click"), (), (IdColumn("item"), IdColumn("user")))
    other.write(tmp_path / "other.yaml")
    assert find_schema(tmp_path, schema_path=tmp_path / "other.yaml") == other
    assert find_schema(tmp_path, features=["item", "user"], label="click") == other


def test_a_label_or_columns_beside_a_schema_are_not_ignored(tmp_path: Path) -> None:
    touch(tmp_path, "a.parquet")
    schema = Schema(LabelColumn("click"), (), (IdColumn("user"),))
    schema.write(tmp_path / "schema.yaml")
    assert find_schema(tmp_path, label="click") == schema
    for path in (None, tmp_path / "schema.yaml"):
        with pytest.raises(
            ConfigError, match=r"--label buy is for .*schema\.yaml is one, and its label is click"
        ):
            find_schema(tmp_path, path, label="buy")
    with pytest.raises(ConfigError, match=r"--schema .*schema\.yaml and --features user,item both say"):
        find_schema(tmp_path, tmp_path / "schema.yaml", ["user", "item"])
    several = Schema(None, (), (IdColumn("user"),), labels=(LabelColumn("click"), LabelColumn("buy")))
    several.write(tmp_path / "schema.yaml")
    with pytest.raises(ConfigError, match="its label is click, buy; change it there, or leave out --label"):
        find_schema(tmp_path, label="buy")


def test_no_schema_or_two_different_ones_is_an_error_that_says_what_to_pass(tmp_path: Path) -> None:
    touch(tmp_path, "x/a/1.parquet", "x/b/1.parquet")
    with pytest.raises(DataError, match=r"no schema\.yaml in .*--schema.*--features"):
        find_schema(tmp_path / "x" / "a")
    Schema(None, (), (IdColumn("user"),)).write(tmp_path / "x" / "a" / "schema.yaml")
    Schema(None, (), (IdColumn("item"),)).write(tmp_path / "x" / "b" / "schema.yaml")
    with pytest.raises(DataError, match=r"different schemas: .*a/schema\.yaml and .*b/schema\.yaml"):
        find_schema([tmp_path / "x" / "a", tmp_path / "x" / "b"])


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"batch_size": 2.5}, "batch_size is 2.5; it must be a whole number"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"batch_size": 8, "epochs": 1.5}, "epochs is 1.5; it must be a whole number"),
    ],
)
def test_numbers_of_a_stream_are_looked_at_before_its_files(numbers: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SampleStream("nowhere.parquet", Schema(None, (), (IdColumn("user"),)), **numbers)
