"""A data folder is whole and equal however it came about, or refused."""

import json
import multiprocessing
import resource
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowhaul.data.folder import files as folder_files
from rowhaul.data.folder import writer as folder_module
from rowhaul.data.folder.writer import PROGRESS_FILE, Chunk, FolderWriter, check_complete
from rowhaul.data.schema import Schema
from rowhaul.errors import ConfigError, DataError

SCHEMA = Schema.from_dict({"label": "y", "ids": ["a"]})
MADE_BY = {"command": "test", "seed": 1}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(folder_module, "ROWS_PER_PART", 100)
    monkeypatch.setattr(folder_files, "ROWS_PER_GROUP", 30)


def chunks(sizes, position=None, stop_after=None):
    """Chunks of these sizes, those behind the position only; interrupted after some."""
    before = 0
    for number, size in enumerate(sizes):
        if number == stop_after:
            raise KeyboardInterrupt
        rows = np.arange(before, before + size)
        before += size
        if position is None or number > position["chunk"]:
            batch = pa.RecordBatch.from_arrays(
                [pa.array((rows % 2).astype(np.int8)), pa.array(rows)], ["y", "a"]
            )
            yield Chunk(batch, {"chunk": number}, before / max(1, sum(sizes)))


def write(folder, sizes, stop_after=None, **options):
    with FolderWriter(folder, SCHEMA, MADE_BY, **options) as writer:
        writer.write(chunks(sizes, writer.position, stop_after))
        return writer.finish({"fact": 7})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def ids(folder: Path) -> list[int]:
    return [key for path in sorted(folder.glob("*.parquet")) for key in pq.read_table(path)["a"].to_pylist()]


def test_layout_and_manifest(tmp_path):
    manifest = write(tmp_path / "data", [70] * 6)
    folder = tmp_path / "data"
    assert ids(folder) == list(range(378))
    assert ids(folder / "test") == list(range(378, 420))
    assert sorted(contents(folder)) == [
        "manifest.json",
        *(f"part-0000{number}.parquet" for number in range(4)),
        "schema.yaml",
        "test/part-00000.parquet",
        "test/part-00001.parquet",
    ]
    assert Schema.read(folder / "schema.yaml") == SCHEMA
    assert json.loads((folder / "manifest.json").read_text()) == manifest
    assert (manifest["rows"], manifest["train_rows"], manifest["fact"]) == (420, 378, 7)
    for one in manifest["files"]:
        metadata = pq.read_metadata(folder / one["name"])
        assert metadata.num_rows == one["rows"]
        assert (folder / one["name"]).stat().st_size == one["bytes"]
    groups = pq.read_metadata(folder / "part-00000.parquet")
    assert [groups.row_group(number).num_rows for number in range(4)] == [30, 30, 30, 10]
    check_complete(folder)
    check_complete(folder / "test")
    check_complete(folder / "test" / "part-00000.parquet")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 250), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 1),
    stops=st.lists(st.integers(0, 8), max_size=4),
    share=st.sampled_from([0, 0.1, 0.5, 0.9]),
)
def test_interruptions_leave_no_trace(tmp_path_factory, sizes, stops, share):
    base = tmp_path_factory.mktemp("folders")
    write(base / "once", sizes, test_share=share)
    for stop in [min(stop, len(sizes) - 1) for stop in stops]:
        with pytest.raises(KeyboardInterrupt):
            write(base / "often", sizes, stop_after=stop, test_share=share)
        finished_parts = sum(sizes[:stop]) >= 100
        if finished_parts:
            with pytest.raises(DataError, match="is unfinished"):
                check_complete(base / "often")
    write(base / "often", sizes, test_share=share)
    assert contents(base / "often") == contents(base / "once")
    assert ids(base / "once") + ids(base / "once" / "test") == list(range(sum(sizes)))


def test_a_crash_at_any_rename_is_recovered(tmp_path, monkeypatch):
    sizes = [130] * 5
    write(tmp_path / "once", sizes, test_share=0.5)
    real = {name: getattr(Path, name) for name in ("replace", "rename", "unlink")}
    calls = 0
    crash_at = 0

    def crashing(name):
        def call(self, *arguments, **options):
            nonlocal calls
            calls += 1
            if calls == crash_at:
                raise KeyboardInterrupt
            return real[name](self, *arguments, **options)

        return call

    for name in real:
        monkeypatch.setattr(Path, name, crashing(name))
    crashes = 0
    while True:
        crash_at, calls = crash_at + 1, 0
        folder = tmp_path / f"crash-{crash_at}"
        try:
            write(folder, sizes, test_share=0.5)
            break
        except KeyboardInterrupt:
            crashes += 1
            crash_at_now, crash_at = crash_at, 0
            if (folder / PROGRESS_FILE).exists():
                with pytest.raises(DataError, match="is unfinished"):
                    check_complete(folder / "test" / "part-00000.parquet")
            write(folder, sizes, test_share=0.5)
            crash_at = crash_at_now
        assert contents(folder) == contents(tmp_path / "once")
    assert crashes > 20


def test_a_finished_folder_is_kept_unless_overwritten(tmp_path):
    write(tmp_path, [150])
    with pytest.raises(DataError, match="already holds a finished data set"):
        write(tmp_path, [150])
    assert ids(tmp_path) == list(range(135))
    write(tmp_path, [310], overwrite=True)
    write(tmp_path, [50], overwrite=True, test_share=0)
    assert sorted(contents(tmp_path)) == ["manifest.json", "part-00000.parquet", "schema.yaml"]


def test_a_failed_overwrite_can_be_tried_again(tmp_path):
    write(tmp_path, [150])
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [50, 50], stop_after=1, overwrite=True)
    assert list(contents(tmp_path)) == ["schema.yaml"]
    with pytest.raises(DataError, match="holds other files"):
        write(tmp_path, [50])
    write(tmp_path, [50], overwrite=True)
    assert ids(tmp_path) == list(range(45))


def test_an_interrupted_overwrite_is_resumed_by_the_same_command(tmp_path):
    sizes = [80] * 5
    write(tmp_path / "once", sizes)
    write(tmp_path / "data", [150])
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "data", sizes, stop_after=3, overwrite=True)
    with FolderWriter(tmp_path / "data", SCHEMA, MADE_BY, overwrite=True) as writer:
        assert (writer.rows, writer.position) == (200, {"chunk": 1})
    write(tmp_path / "data", sizes, overwrite=True)
    assert contents(tmp_path / "data") == contents(tmp_path / "once")
    with FolderWriter(
        tmp_path / "data", SCHEMA, MADE_BY, overwrite=True
    ) as writer:  # finished: from the start
        assert (writer.rows, writer.position) == (0, None)  # it was finished


def test_an_overwrite_without_a_row_keeps_what_was_there(tmp_path):
    write(tmp_path, [150])
    before = contents(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [50], stop_after=0, overwrite=True)
    with pytest.raises(DataError, match="no rows to write"):
        write(tmp_path, [], overwrite=True)
    assert contents(tmp_path) == before
    check_complete(tmp_path)


def test_only_the_same_command_resumes(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [150, 150], stop_after=1)
    with (
        pytest.raises(DataError, match=r"begun by another command \(seed was 1, now 2\)"),
        FolderWriter(tmp_path, SCHEMA, {**MADE_BY, "seed": 2}),
    ):
        pass
    with (
        pytest.raises(DataError, match=r"\(history was None, now 5\)"),
        FolderWriter(tmp_path, SCHEMA, {**MADE_BY, "history": 5}),
    ):
        pass
    with (
        pytest.raises(DataError, match=r"\(seed was 1, now None\)"),
        FolderWriter(tmp_path, SCHEMA, {"command": "test"}),
    ):
        pass
    with pytest.raises(DataError, match=r"test_share was 0.1, now 0.2"):
        write(tmp_path, [150, 150], test_share=0.2)
    write(tmp_path, [150, 150], test_share=0.2, overwrite=True)


def test_changed_input_cannot_resume(tmp_path):
    def attempt(size, stop_after=None):
        inputs = [{"path": "log.txt", "bytes": size}]
        write(tmp_path, [150, 150], stop_after=stop_after, inputs=inputs)

    with pytest.raises(KeyboardInterrupt):
        attempt(5, stop_after=1)
    with pytest.raises(DataError, match=r"log.txt has changed"):
        attempt(6)
    attempt(5)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")], ids=["gone", "cut"])
def test_a_folder_that_has_lost_a_part_is_not_resumed(tmp_path, damage):
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, [80] * 5, stop_after=4)
    damage(tmp_path / "part-00001.parquet")
    with pytest.raises(DataError, match=r"part-00001.parquet is missing, .* start over \(--overwrite\)"):
        write(tmp_path, [80] * 5)
    write(tmp_path, [80] * 5, overwrite=True)
    assert ids(tmp_path) + ids(tmp_path / "test") == list(range(400))


def test_nothing_is_left_when_nothing_was_finished(tmp_path):
    for folder in (tmp_path / "new", tmp_path / "old"):
        (tmp_path / "old").mkdir(exist_ok=True)
        with pytest.raises(KeyboardInterrupt):
            write(folder, [50, 50], stop_after=1)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert contents(tmp_path / "old") == {}
    with pytest.raises(DataError, match="no rows to write"):
        write(tmp_path / "new", [0])
    assert not (tmp_path / "new").exists()


def test_foreign_folders_pass_the_check_and_are_not_written_to(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "mine.parquet")
    check_complete(tmp_path)
    check_complete(tmp_path / "mine.parquet")
    check_complete("relative/nothing.parquet")
    with pytest.raises(DataError, match="holds other files"):
        write(tmp_path, [10], overwrite=True)
    assert list(contents(tmp_path)) == ["mine.parquet"]


@pytest.mark.parametrize("limit", [200, 1500, 2360, 2700])
def test_a_disk_that_runs_full(tmp_path, limit):
    sizes = [100] * 30
    write(tmp_path / "once", sizes)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(DataError, match=r"cannot write to .*: File too large; make room"):
            write(tmp_path / "full", sizes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("full/.tmp-*"))
    assert not (tmp_path / "full" / "manifest.json").exists()
    write(tmp_path / "full", sizes)
    assert contents(tmp_path / "full") == contents(tmp_path / "once")


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file is a file; choose a folder"):
        write(tmp_path / "file", [10])
    for folder in (tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(DataError, match=f"cannot write to {folder}"):
            write(folder, [10])


def test_two_processes_cannot_write_one_folder(tmp_path):
    with FolderWriter(tmp_path, SCHEMA, MADE_BY) as writer:
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            assert "is being written by another process" in pool.apply(error_of_opening, (tmp_path,))
        writer.write(chunks([10]))
        writer.finish({})


def error_of_opening(folder: Path) -> str:
    try:
        with FolderWriter(folder, SCHEMA, MADE_BY):
            return ""
    except DataError as error:
        return str(error)


def test_a_share_is_below_one(tmp_path):
    for share in (-0.1, 1, 2):
        with pytest.raises(ConfigError, match="test_share"):
            FolderWriter(tmp_path, SCHEMA, MADE_BY, test_share=share)


def test_progress_is_reported_and_kept_as_json(tmp_path):
    seen = []
    with FolderWriter(tmp_path, SCHEMA, MADE_BY) as writer:
        writer.write(chunks([60, 60, 60]), lambda rows, share: seen.append((rows, round(share, 2))))
        assert json.loads((tmp_path / PROGRESS_FILE).read_text())["position"] == {"chunk": 2}
        writer.finish({})
    assert seen == [(60, 0.33), (120, 0.67), (180, 1.0)]
