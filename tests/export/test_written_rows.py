"""A file of rows that cannot be written is an error, not the end of the process, and leaves no file."""

import errno
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from rowhaul.checkpoint.progress import Counter
from rowhaul.errors import CheckpointError
from rowhaul.export.serving.row_file import UnknownIds, write_row_file
from rowhaul.serve.row_file import RowFile
from rowhaul.store import TableSpec
from rowhaul.store.served_rows import ServedRows, equal_records
from rowhaul.train.save_thread import SaveCancelledError

DIM = 16
FULL = """
import os, sys
from pathlib import Path
tests, path, before = sys.argv[1:]
exec(before)
sys.path.insert(0, tests)
from test_written_rows import table, write
try:
    write(Path(path), table(100_000))  # 6.4 MB
except OSError as error:
    print("told:", error)
"""


def table(num_rows, error=None):
    """Rows of which each holds its key; ``error`` ends reading them halfway."""

    def blocks():
        yield from np.array_split(np.arange(num_rows), 4)

    def records():
        for number, keys in enumerate(blocks()):
            if number == 2 and error is not None:
                raise error
            yield equal_records(keys, np.repeat(keys, DIM).reshape(-1, DIM).astype(np.float32))

    return ServedRows(DIM, "float32", num_rows, DIM * 4, blocks, records)


def write(path, rows):
    unknown = UnknownIds("default", 0, {"user": TableSpec("user", DIM, -0.01, 0.01)}).numbers("user", rows)
    return write_row_file({"user": rows}, {"user": unknown}, path, 1, Counter(1, lambda done, total: None))


@pytest.fixture
def tiny_disk(tmp_path):
    """A real file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "rowhaul-test", str(disk)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted only by root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("before", ["", "vars(os).pop('posix_fallocate', None)"], ids=["reserved", "zeros"])
def test_a_full_disk_is_told(before, tiny_disk, request):
    """In a process of its own, which a signal would end."""
    given = [str(request.path.parent), str(tiny_disk / "rows.bin"), before]
    ended = subprocess.run([sys.executable, "-c", FULL, *given], capture_output=True, text=True)
    assert ended.returncode == 0, (ended.returncode, ended.stderr)
    assert ended.stdout.startswith("told: [Errno 28] No space left on device")
    assert list(tiny_disk.iterdir()) == []  # its room is free again


@pytest.mark.parametrize("error", [SaveCancelledError(), CheckpointError("row 7 is damaged")])
def test_what_ends_the_writing_is_the_error(error, tmp_path):
    """Also where it is met while rows are read; nothing is left of the file."""
    with pytest.raises(type(error)) as found:
        write(tmp_path / "rows.bin", table(1000, error))
    assert found.value is error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_reserves_nothing_gets_zeros_first(number, tmp_path, monkeypatch):
    def refuse(*given):
        raise OSError(number, "cannot")

    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    monkeypatch.setattr("rowhaul.export.serving.row_file._ZEROS", 4096)
    write(tmp_path / "rows.bin", table(1000))
    file = RowFile(tmp_path / "rows.bin")
    values = file.data[file.field("user", "records_at") :][: 1000 * DIM * 4].view(np.float32)
    assert np.array_equal(values.reshape(-1, DIM)[:, 0], file.keys("user"))
    assert sorted(file.keys("user")) == list(range(1000))
