"""From raw text to a data folder, through every option, interruption and bad input."""

import gzip
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rowhaul.data.folder import writer as folder_module
from rowhaul.data.folder.writer import PROGRESS_FILE
from rowhaul.data.formats import time_order
from rowhaul.data.keys import hash_string
from rowhaul.data.preparing import prepare
from rowhaul.data.schema import Schema
from rowhaul.data.text import reader as text
from rowhaul.errors import BadLineError, ConfigError, DataError

SCHEMA = Schema.from_dict({"label": "y", "ids": [{"name": "n", "type": "integer"}, "s"]})


def small_pieces(patch=setattr):
    patch(folder_module, "ROWS_PER_PART", 1000)
    patch(text, "ROWS_AT_ONCE", 300)
    patch(time_order, "ROWS_PER_RUN", 700)
    patch(time_order, "ROWS_PER_SLICE", 128)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    small_pieces(monkeypatch.setattr)


def lines(first: int, last: int) -> str:
    return "".join(f'{n % 2},{n},"word ""{n}""\n"\n' for n in range(first, last))


@pytest.fixture
def logs(tmp_path):
    """Two CSV files of 3,000 rows in all, one of them gzipped."""
    (tmp_path / "a.csv").write_text("y,n,s\n" + lines(0, 1750))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(("y,n,s\n" + lines(1750, 3000)).encode()))
    return [tmp_path / "a.csv", tmp_path / "b.csv.gz"]


def numbers(folder: Path) -> list[int]:
    paths = [*sorted(folder.glob("*.parquet")), *sorted(folder.glob("test/*.parquet"))]
    return [number for path in paths for number in pq.read_table(path)["n"].to_pylist()]


def parts(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.parquet")}


def test_rows_without_a_label_are_not_split(logs, tmp_path):
    unlabelled = Schema(label=None, dense=(), ids=SCHEMA.ids)
    report = prepare(logs, tmp_path / "data", "csv", schema=unlabelled)
    assert (report.rows, report.test_rows, report.labelled) == (3000, 0, False)
    assert numbers(tmp_path / "data") == list(range(3000))
    report = prepare(logs, tmp_path / "split", "csv", schema=unlabelled, test_share=0.5)
    assert report.test_rows == 1500


def test_csv_files_become_a_folder(logs, tmp_path):
    seen = []
    report = prepare(
        logs, tmp_path / "data", "csv", schema=SCHEMA, progress=lambda *given: seen.append(given)
    )
    assert (report.rows, report.test_rows, report.files, report.bad_lines) == (3000, 300, 4, 0)
    assert numbers(tmp_path / "data") == list(range(3000))
    table = pq.read_table(tmp_path / "data" / "part-00000.parquet")
    assert table["s"][7].as_py() == hash_string('word "7"\n')
    assert seen[-1] == (3000, 1.0)
    assert sorted(seen) == seen
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    assert manifest["made_by"]["format"] == "csv"
    assert manifest["bytes"] == report.bytes == sum(len(data) for data in parts(tmp_path / "data").values())
    assert not (tmp_path / "data" / PROGRESS_FILE).exists()


def test_a_bad_line_stops_and_skipping_goes_on_from_there(logs, tmp_path):
    with logs[0].open("a") as file:
        file.write("2,1,x\n1,1,x\nonly one\n")
    with pytest.raises(BadLineError, match=rf"{logs[0]}, line 3,502: column y: '2' is not 0 or 1") as caught:
        prepare(logs, tmp_path / "data", "csv", schema=SCHEMA)
    assert caught.value.line == 3502
    report = prepare(logs, tmp_path / "data", "csv", schema=SCHEMA, on_bad_line="skip")
    assert report.resumed_rows == 1000
    assert (report.rows, report.bad_lines) == (3001, 2)
    assert "line 3,504: 3 columns expected, 1 found" in report.bad_line_examples[1]
    assert json.loads((tmp_path / "data/manifest.json").read_text())["bad_lines"] == 2


def test_bad_lines_are_counted_once_over_interruptions(logs, tmp_path):
    bad = [*lines(0, 3000).splitlines(keepends=True)]
    for number in range(1000, 0, -100):
        bad.insert(2 * number, "bad\n")
    logs[0].write_text("y,n,s\n" + "".join(bad))
    once = prepare(logs[0], tmp_path / "once", "csv", schema=SCHEMA, on_bad_line="skip")
    for stop in (1100, 1600, 2900, 3000):
        with pytest.raises(KeyboardInterrupt):
            prepare(
                logs[0],
                tmp_path / "often",
                "csv",
                schema=SCHEMA,
                on_bad_line="skip",
                progress=interrupt_at(stop),
            )
    often = prepare(logs[0], tmp_path / "often", "csv", schema=SCHEMA, on_bad_line="skip")
    assert often.resumed_rows == 3000
    assert (once.bad_lines, once.bad_line_examples) == (often.bad_lines, often.bad_line_examples)
    assert once.bad_lines == 10
    assert parts(tmp_path / "once") == parts(tmp_path / "often")


def interrupt_at(stop: int):
    def progress(rows: int, share: float) -> None:
        if rows >= stop:
            raise KeyboardInterrupt

    return progress


RATINGS = "".join(f"{n % 37 + 1}::{n % 11 + 1}::{n % 5 + 1}::{(n * 7919) % 1009}\n" for n in range(4000))
MOVIES = "".join(f"{n}::title::Drama|Genre{n % 3}\n" for n in range(1, 12))


@pytest.fixture
def movielens(tmp_path):
    (tmp_path / "ml").mkdir()
    (tmp_path / "ml" / "ratings.dat").write_text(RATINGS)
    (tmp_path / "ml" / "movies.dat").write_text(MOVIES)
    return tmp_path / "ml"


def test_time_order_is_a_stable_sort(movielens, tmp_path):
    def users_and_movies(**options):
        prepare(movielens, tmp_path / "data", "movielens", overwrite=True, **options)
        folder = tmp_path / "data"
        paths = [*sorted(folder.glob("*.parquet")), *sorted(folder.glob("test/*.parquet"))]
        return [(row["user"], row["movie"]) for path in paths for row in pq.read_table(path).to_pylist()]

    records = [[int(field) for field in line.split("::")] for line in RATINGS.splitlines()]
    in_time = sorted(records, key=lambda record: record[3])
    assert users_and_movies() == [(user, movie) for user, movie, _, _ in in_time]
    assert users_and_movies(time_order=False) == [(user, movie) for user, movie, _, _ in records]
    assert not (tmp_path / "data" / "_scratch").exists()


def test_time_order_resumes_to_the_same_files(movielens, tmp_path):
    prepare(movielens, tmp_path / "once", "movielens")
    for stop in (1200, 1900, 3100):
        with pytest.raises(KeyboardInterrupt):
            prepare(movielens, tmp_path / "often", "movielens", progress=interrupt_at(stop))
    prepare(movielens, tmp_path / "often", "movielens")
    assert parts(tmp_path / "once") == parts(tmp_path / "often")


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from test_prepare import SCHEMA, small_pieces
from rowhaul.data.preparing import prepare
small_pieces()
def progress(rows, share):
    print(rows, flush=True)
    time.sleep(0.04)
prepare({inputs!r}, {out!r}, "csv", schema=SCHEMA, progress=progress)
"""


@pytest.mark.slow
def test_killed_processes_are_resumed(tmp_path):
    inputs = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv.gz")]
    Path(inputs[0]).write_text("y,n,s\n" + lines(0, 6000))
    Path(inputs[1]).write_bytes(gzip.compress(("y,n,s\n" + lines(6000, 12_000)).encode()))
    prepare(inputs, tmp_path / "once", "csv", schema=SCHEMA)
    script = SCRIPT.format(tests=str(Path(__file__).parent), inputs=inputs, out=str(tmp_path / "often"))
    rng = random.Random(5)
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(rng.randint(4, 8)):
            process.stdout.readline()
        time.sleep(rng.uniform(0, 0.04))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert prepare(inputs, tmp_path / "often", "csv", schema=SCHEMA).resumed_rows > 0
    assert parts(tmp_path / "often") == parts(tmp_path / "once")


def test_histories_are_not_continued_without_them(movielens, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        prepare(movielens, tmp_path / "data", "movielens", history=5, progress=interrupt_at(1200))
    with pytest.raises(DataError, match=r"begun by another command \(history was 5, now None\)"):
        prepare(movielens, tmp_path / "data", "movielens")
    prepare(movielens, tmp_path / "data", "movielens", history=5)


def test_changed_input_is_not_resumed(logs, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        prepare(logs, tmp_path / "data", "csv", schema=SCHEMA, progress=interrupt_at(1500))
    with logs[1].open("ab") as file:
        file.write(gzip.compress(b"1,1,x\n", mtime=0))
    with pytest.raises(DataError, match=rf"{logs[1]} has changed since"):
        prepare(logs, tmp_path / "data", "csv", schema=SCHEMA)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"y,n,s\n", "no rows to write"),
        (b"y,n\n1,2\n", "no column 's'"),
        (gzip.compress(b"y,n,s\n" + b"1,2,x\n" * 9, mtime=0)[:-9], "is cut short"),
    ],
)
def test_files_without_rows(tmp_path, content, words):
    (tmp_path / "log.csv").write_bytes(content)
    with pytest.raises(DataError, match=words):
        prepare(tmp_path / "log.csv", tmp_path / "data", "csv", schema=SCHEMA)
    assert not (tmp_path / "data").exists()


def test_wrong_settings(logs, tmp_path):
    with pytest.raises(ConfigError, match="on_bad_line is 'ignore'"):
        prepare(logs, tmp_path / "data", "csv", schema=SCHEMA, on_bad_line="ignore")
    with pytest.raises(DataError, match="no such schema file"):
        prepare(logs, tmp_path / "data", "csv", schema=tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="unknown format"):
        prepare(logs, tmp_path / "data", "tsv")
    assert not (tmp_path / "data").exists()


def test_the_check_for_collisions_is_reported(logs, movielens, tmp_path):
    report = prepare(logs, tmp_path / "data", "csv", schema=SCHEMA, check_collisions=True)
    assert report.collisions == {"s": 0}
    assert json.loads((tmp_path / "data/manifest.json").read_text())["collisions"] == {"s": 0}
    assert prepare(movielens, tmp_path / "ml-data", "movielens", check_collisions=True).collisions == {
        "genres": 0
    }
    assert prepare(logs, tmp_path / "data", "csv", schema=SCHEMA, overwrite=True).collisions is None
