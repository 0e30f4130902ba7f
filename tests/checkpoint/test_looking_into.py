"""Finding a checkpoint, saying what it holds, and single rows by their keys."""

import json

import numpy as np
import pytest
from row_checkpoints import block, record, write

from rowhaul.checkpoint import CheckpointReader, CheckpointWriter
from rowhaul.checkpoint import shard as shards
from rowhaul.checkpoint.describing import damaged_files, describe
from rowhaul.checkpoint.finding import find_rows
from rowhaul.checkpoint.opening import beside, open_checkpoint, run_of
from rowhaul.checkpoint.writer import prepare, publish
from rowhaul.errors import CheckpointError

EDGES = {0: 1, -1: 2, 2**63 - 1: 3, -(2**63): 4, 77: 5}


@pytest.fixture
def run(tmp_path):
    for step in (3, 12):
        write(tmp_path / "run" / "checkpoints" / f"step-{step:09d}", {"t": EDGES}, facts={"step": step})
    return tmp_path / "run"


def test_a_run_means_its_newest_checkpoint(run):
    newest = run / "checkpoints" / "step-000000012"
    assert [open_checkpoint(path).path for path in (run, run / "checkpoints", newest)] == [newest] * 3
    assert [path.name for path in beside(open_checkpoint(run))] == ["step-000000003", "step-000000012"]
    assert run_of(open_checkpoint(run)) == run


def test_what_is_no_checkpoint_is_told_so(tmp_path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(tmp_path / "x")
    with pytest.raises(CheckpointError, match="is no checkpoint, and holds no complete one"):
        open_checkpoint(tmp_path)


def test_sizes_are_those_of_the_files(run):
    reader = open_checkpoint(run)
    contents = describe(reader)
    assert (contents.step, contents.row_optimizer, contents.model) == (12, "rowwise_adagrad", None)
    (table,) = contents.tables
    assert (table.rows, table.dim, table.state_width, table.dtype) == (5, 2, 1, "float32")
    on_disk = {path.name: path.stat().st_size for path in reader.path.iterdir()}
    assert contents.bytes == sum(on_disk.values()) - on_disk["manifest.json"]
    assert table.bytes == sum(on_disk[name] for name in reader.tables["t"].files)


def test_the_layout_of_a_cluster_is_told_apart(tmp_path):
    folder = prepare(tmp_path / "c")
    writer = shards.ShardWriter(folder, "r0000")
    writer.table("t", [block(EDGES)], dim=2, state_width=1, dtype="float32")
    for name in ("layout-r0000-00000", "schedule"):
        writer.arrays(name, {"x": np.zeros(3)})
    publish(tmp_path / "c", {"cluster": {"settings": {"workers": "2"}}}, [writer.written])
    contents = describe(CheckpointReader(tmp_path / "c"))
    assert list(contents.layout) == ["layout-r0000-00000.safetensors", "schedule.safetensors"]
    assert contents.saved_by == {"workers": "2"}


def test_all_damaged_files_are_named(run, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 1)
    reader = write(run / "checkpoints" / "step-000000013", {"t": {key: key for key in range(9)}}, blocks_of=3)
    first, second, third = reader.tables["t"].files
    (reader.path / first).write_bytes(b"half")
    (reader.path / third).unlink()
    told = []
    damaged = damaged_files(reader, lambda done, total: told.append(done / total))
    assert list(damaged) == [first, third]
    assert "is damaged" in damaged[first]
    assert "is missing" in damaged[third]
    assert told[-1] == 1
    assert second not in damaged


def test_rows_are_found_by_key_in_any_file(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 1)
    reader = write(tmp_path / "c", {"t": EDGES, "other": {5: 50}}, blocks_of=2)
    assert len(reader.tables["t"].files) == 3
    files = []
    found = find_rows(reader, "t", [*EDGES, 5, -2, 77], files.append)
    assert {key: [*row.values.tolist(), *row.state.tolist()] for key, row in found.items()} == {
        key: record(value).tolist() for key, value in EDGES.items()
    }
    assert files == list(reader.tables["t"].files)


def test_a_row_of_a_damaged_file_is_not_shown(tmp_path):
    reader = write(tmp_path / "c", {"t": EDGES})
    path = reader.path / reader.tables["t"].files[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged"):
        find_rows(CheckpointReader(reader.path), "t", [0])


def test_facts_that_were_not_saved_are_none(tmp_path):
    write(tmp_path / "c", {})
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    (tmp_path / "c" / "manifest.json").write_text(json.dumps({**manifest, "facts": {}, "xxh3": ""}))
    contents = describe(CheckpointReader(tmp_path / "c"))
    assert (contents.step, contents.samples, contents.saved_by, contents.tables) == (None, None, None, ())


@pytest.mark.parametrize("state", [0, 1, 2])  # numbers a chunk: of none, of one, of one a value
def test_of_pruned_rows_it_is_told_what_is_there(state, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 1)
    widths = {0: (0, 0), 1: (1, 1), 2: (2, 1)}[state]  # of the first chunk, of two values, and of the second
    chunks = np.array([[1, 2, 8, 9], [3, 4, 8, 9], [5, 6, 0, 0]], np.float32)[:, : 2 + widths[0]]
    parts = {
        "keys": np.array([4, 5, 7]),
        "present": np.array([[False, False], [True, False], [True, True]]),
        "chunks": chunks,
        "utilities": np.array([[0, 0], [1, 2], [3, 4]], np.float32),
        "touched": np.zeros(3, np.int32),
    }
    parts |= {"starts": np.array([0, 2, 3]), "columns": np.array([0, 3, 1])}  # of four, one is not stored
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.blocks("t", [parts], 4, 0, "float32", "chunked")
        writer.facts["pruning"] = {"chunks": 2, "file": "none"}
    reader = CheckpointReader(tmp_path / "c")
    found = find_rows(reader, "t", [4, 5, 7, 9])
    assert {key: row.values.tolist() for key, row in found.items()} == {
        4: [0, 0, 0, 0],
        5: [1, 0, 0, 2],
        7: [3, 5, 0, 4],
    }
    assert found[5].stored.tolist() == [True, False, False, True]
    assert found[7].stored.tolist() == [True, True, False, True]
    assert found[5].details["present"] == (True, False)
    assert found[7].details["utilities"] == (3, 4)
    second = chunks[2, 1 : 1 + widths[1]].tolist()
    assert found[7].state.tolist() == [*chunks[1, 2:].tolist(), *second]
    (table,) = describe(reader).tables
    assert table.details == {"chunks": 2, "chunks_there": 3, "columns": 3}
    (reader.path / reader.tables["t"].files[0]).write_bytes(b"")
    (table,) = describe(reader).tables
    assert table.details == {"chunks": 2, "chunks_there": None, "columns": None}
