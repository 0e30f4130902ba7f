"""The raw text of a generated log, read back by the readers of the real data sets."""

from __future__ import annotations

import gzip
import zipfile
from dataclasses import replace

import pyarrow as pa
import pytest

from rowhaul.data.formats import Options, open_format
from rowhaul.data.generate import LogGenerator, preset_named, write_raw
from rowhaul.data.text.reader import BadLines
from rowhaul.errors import ConfigError, DataError

ROWS = 4_000


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("criteo", "train.txt"),
        ("criteo", "train.txt.gz"),
        ("criteo-tb", "day_0.gz"),
        ("criteo-search", "CriteoSearchData"),
        ("avazu", "train.csv"),
        ("movielens", "ml-1m"),
        ("movielens", "ml-1m.zip"),
        ("taobao", "taobao"),
    ],
)
def test_reading_the_raw_text_gives_the_generated_columns(preset, name, tmp_path):
    generator = LogGenerator(preset, ROWS, seed=3)
    write_raw(generator, tmp_path / name)
    source = open_format(preset, [tmp_path / name], Options())
    assert source.schema == generator.schema
    read = pa.Table.from_batches([chunk.batch for chunk in source.chunks(None, BadLines(skip=False))])
    made = pa.Table.from_batches(generator.batches())
    for column in made.column_names:
        assert read[column].to_pylist() == made[column].to_pylist(), column
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_criteo_line_is_a_label_13_counts_and_26_tokens_that_are_the_keys(tmp_path):
    generator = LogGenerator("criteo", 500)
    write_raw(generator, tmp_path / "train.txt.gz")
    rows = pa.Table.from_batches(generator.batches()).to_pylist()
    with gzip.open(tmp_path / "train.txt.gz", "rt") as lines:
        for line, row in zip(lines, rows, strict=True):
            label, *fields = line.rstrip("\n").split("\t")
            assert int(label) == row["label"]
            numbers, tokens = fields[:13], fields[13:]
            assert [int(number) if number else None for number in numbers] == [
                row[f"I{i}"] for i in range(1, 14)
            ]
            assert {len(token) for token in tokens} <= {0, 8}
            assert [int(token, 16) if token else None for token in tokens] == [
                row[f"C{i}"] for i in range(1, 27)
            ]


def test_the_movielens_archive_is_laid_out_like_the_published_one(tmp_path):
    write_raw(LogGenerator("movielens", 1_000), tmp_path / "ml-1m.zip")
    with zipfile.ZipFile(tmp_path / "ml-1m.zip") as archive:
        assert sorted(archive.namelist()) == ["ml-1m/movies.dat", "ml-1m/ratings.dat", "ml-1m/users.dat"]
        ratings = archive.read("ml-1m/ratings.dat").decode().splitlines()
        assert len(archive.read("ml-1m/users.dat").splitlines()) == 6_040
    stars = {line.split("::")[2] for line in ratings}
    assert stars == {"1", "2", "3", "4", "5"}


def test_an_existing_output_and_a_preset_without_raw_text_are_refused(tmp_path):
    generator = LogGenerator("avazu", 10)
    write_raw(generator, tmp_path / "train.csv")
    with pytest.raises(DataError, match="exists already"):
        write_raw(generator, tmp_path / "train.csv")
    mine = LogGenerator(replace(preset_named("avazu"), name="mine"), 10)
    with pytest.raises(ConfigError, match="preset 'mine' has no raw format"):
        write_raw(mine, tmp_path / "mine.csv")


def test_an_interrupted_output_leaves_nothing_behind(tmp_path, monkeypatch):
    generator = LogGenerator("taobao", 10)
    monkeypatch.setattr(generator, "samples", lambda: iter([None]))  # fails in the middle of the first file
    with pytest.raises(AttributeError):
        write_raw(generator, tmp_path / "taobao")
    assert list(tmp_path.iterdir()) == []
