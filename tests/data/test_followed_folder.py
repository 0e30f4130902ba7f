"""A followed folder: files that come late, also while the run was down, and those that were replaced are
told; what the system cannot read now is tried again."""

import errno
import os
import resource
from contextlib import contextmanager
from itertools import count, islice, takewhile

import pyarrow.parquet as pq
import pytest

from click_logs import click_log
from rowhaul.data.parquet import ParquetRows
from rowhaul.data.sources import folder as followed
from rowhaul.data.sources.folder import FolderSource
from rowhaul.errors import DataError

SAMPLES = 20


def put(folder, *numbers):
    for number in numbers:
        pq.write_table(click_log(SAMPLES, number), folder / f"part-{number}.parquet")


def read(folder, schema, position, meanwhile=lambda: None):
    """Read all there is; returns samples, the last position in the middle of a file, and what came late."""
    num_samples, late = 0, []
    for chunk in FolderSource(folder, schema, {}).read(position):
        meanwhile()
        if chunk is None:
            break
        num_samples += len(chunk.block)
        late += [one for _, one in chunk.set_aside]
        if len(chunk.block):
            position = chunk.after(len(chunk.block) - 5)
    assert all("sorts before" in one.why for one in late)
    return num_samples, position, [one.where.rpartition("-")[2] for one in late]


@pytest.fixture(params=[256, 3])
def stopped(request, tmp_path, log_schema, monkeypatch):
    """A folder of four files, and a position within the last one."""
    monkeypatch.setattr(followed, "_NAMES_KEPT", request.param)
    put(tmp_path, 10, 20, 30, 40)
    num_samples, position, late = read(tmp_path, log_schema, None)
    assert (num_samples, position["rows"], late) == (4 * SAMPLES, SAMPLES - 5, [])
    assert len(position["seen"]["hashes"]) == 8 * min(request.param, 4)
    return tmp_path, position


def test_files_that_came_late_while_the_run_was_down_are_set_aside(stopped, log_schema):
    folder, position = stopped
    put(folder, 25, 39, 50)
    (folder / "part-30.parquet").unlink()  # it was read, and may go
    num_samples, later, late = read(folder, log_schema, position)
    assert (num_samples, late) == (5 + SAMPLES, ["25.parquet", "39.parquet"])
    assert read(folder, log_schema, later)[2] == []  # they were told


def test_files_that_come_late_while_the_rest_of_one_is_read_are_set_aside(stopped, log_schema):
    folder, position = stopped
    assert read(folder, log_schema, position, lambda: put(folder, 35))[2] == ["35.parquet"]


def test_a_position_of_an_earlier_version_is_read(stopped, log_schema):
    folder, position = stopped
    del position["seen"]
    put(folder, 25)
    assert read(folder, log_schema, position)[::2] == (5, [])


def test_files_older_than_the_names_that_are_kept_are_taken_for_read(stopped, log_schema):
    folder, position = stopped
    put(folder, 15)
    all_kept = not position["seen"]["older_than"]
    assert read(folder, log_schema, position)[2] == (["15.parquet"] if all_kept else [])


def test_a_file_that_becomes_whole_while_it_is_looked_at_is_read(tmp_path, log_schema, monkeypatch):
    put(tmp_path, 10)
    path = tmp_path / "part-10.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    looked_at = []

    def looking(*arguments, **options):
        looked_at.append(path.stat().st_size)
        try:
            return ParquetRows(*arguments, **options)
        except DataError:
            path.write_bytes(content)  # its writer ends before anybody asks what is wrong with it
            raise

    monkeypatch.setattr(followed, "ParquetRows", looking)
    chunks = FolderSource(tmp_path, log_schema, {}).read(None)
    found = [next(chunks) for _ in range(2)]
    assert looked_at == [len(content) - 100, len(content)]
    assert (found[0], len(found[1].block), found[1].set_aside) == (None, SAMPLES, ())


@contextmanager
def no_more_files():
    """This process cannot open any."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def users(*chunks):
    assert not any(one.set_aside for one in chunks)
    return [user for one in chunks for user in one.block.ids[0].values.tolist()]


def test_what_cannot_be_read_now_is_tried_again(tmp_path, log_schema):
    path, table = tmp_path / "part-1.parquet", click_log(SAMPLES, 1)
    pq.write_table(table, path, row_group_size=SAMPLES // 2)
    source = FolderSource(tmp_path, log_schema, {})
    chunks = source.read(None)

    def next_when_it_fails(where):
        with no_more_files():
            assert [next(chunks) for _ in range(3)] == [None] * 3
        assert len(source.notes) == 1
        assert f"{where} cannot be read now ([Errno {errno.EMFILE}]" in source.notes.popleft()

    next_when_it_fails(tmp_path)
    first = next(chunks)
    next_when_it_fails(path)  # its second row group
    assert users(first, next(chunks)) == table["user"].to_pylist()
    next_when_it_fails(tmp_path)
    assert next(chunks) is None


class FailingRows(ParquetRows):
    """Rows of a disk that fails at every second call."""

    calls = count()

    def __init__(self, *given, **options):
        self.fail()
        super().__init__(*given, **options)

    def read(self, row_group, skip=0):
        for block in super().read(row_group, skip):
            self.fail()
            yield block

    def fail(self):
        if next(self.calls) % 2 == 0:
            raise DataError("truncated or damaged") from OSError(errno.EIO, "Input/output error")


def test_a_file_is_read_on_from_the_row_at_which_the_system_failed(tmp_path, log_schema, monkeypatch):
    monkeypatch.setattr(followed, "ParquetRows", FailingRows)
    table = click_log(40_000, 1)  # three blocks
    pq.write_table(table, tmp_path / "part-1.parquet")
    source = FolderSource(tmp_path, log_schema, {})
    found = list(islice(source.read(None), 8))
    assert users(*filter(None, found)) == table["user"].to_pylist()
    assert len(source.notes) == 1


def test_a_file_that_is_replaced_under_its_name_is_set_aside_once(tmp_path, log_schema):
    put(tmp_path, 1, 2)
    damaged = tmp_path / "part-3.parquet"
    damaged.write_bytes(b"PAR1")
    os.utime(damaged, (1, 1))
    source = FolderSource(tmp_path, log_schema, {})
    chunks = source.read(None)
    found = list(takewhile(lambda one: one is not None, chunks))
    position = found[1].after(SAMPLES)

    def told(chunks):
        found = [one for one in islice(chunks, 3) if one is not None]
        assert not any(len(one.block) for one in found)
        return [one.where for chunk in found for _, one in chunk.set_aside if "was replaced" in one.why]

    os.utime(tmp_path / "part-1.parquet")  # its contents are the same
    assert told(chunks) == []
    names = [str(tmp_path / f"part-{number}.parquet") for number in (1, 2, 3)]
    for number, name in enumerate(names, start=5):
        pq.write_table(click_log(SAMPLES, number), name)
    assert told(chunks) == names[:2]
    assert list(source.notes) == [f"{names[2]} is whole now, but was set aside; give it a new name"]
    assert told(chunks) == []
    damaged.unlink()
    again = FolderSource(tmp_path, log_schema, {}).read(position)  # the run was down meanwhile
    assert told(again) == names[1:2]
    assert told(again) == []


def test_a_further_file_is_found_without_sorting_the_others_again(tmp_path, log_schema, monkeypatch):
    many = 1000
    for number in range(many):
        (tmp_path / f"part-{number}.parquet").touch()
    source = FolderSource(tmp_path, log_schema, {})
    expected = [f"part-{number}.parquet" for number in range(many)]
    assert source._names() == expected
    keys = []
    order = followed._order
    monkeypatch.setattr(followed, "_order", lambda name: keys.append(name) or order(name))
    assert source._names() == expected
    assert not keys
    (tmp_path / "part-7.parquet").unlink()
    (tmp_path / "part-500b.parquet").touch()
    expected.remove("part-7.parquet")
    expected.insert(expected.index("part-500.parquet") + 1, "part-500b.parquet")
    assert source._names() == expected
    assert len(keys) < 30


def test_a_position_keeps_the_newest_names_in_whatever_order_they_were_seen(monkeypatch):
    monkeypatch.setattr(followed, "_NAMES_KEPT", 3)
    names = [f"part-{number}.parquet" for number in (9, 10, 2, 11, 1)]
    seen = followed._Seen(names[:2])
    assert (len(seen.kept()["hashes"]), seen.kept()["older_than"]) == (16, "")
    for name in names[2:]:
        seen.add(name)
    assert all(name in seen for name in names)
    assert seen.kept() == followed._Seen(names).kept()
    assert seen.kept()["older_than"] == "part-9.parquet"
    assert seen.kept()["hashes"] == "".join(
        followed._hash(f"part-{number}.parquet") for number in (11, 10, 9)
    )
