"""The on-disk format: whole or not there, and damage is named."""

import json
import tracemalloc

import numpy as np
import pytest
import torch

from rowhaul.checkpoint import CheckpointReader, CheckpointWriter, Shard, ShardWriter, latest_checkpoint
from rowhaul.checkpoint.layout import remove_unfinished
from rowhaul.checkpoint.writer import prepare, publish
from rowhaul.errors import CheckpointError


def blocks(sizes, width=3):
    first = 0
    for size in sizes:
        keys = np.arange(first, first + size, dtype=np.int64) - 5
        yield keys, np.repeat(keys[:, None], width, axis=1).astype(np.float32)
        first += size


def write(path, sizes=(4, 0, 3)):
    with CheckpointWriter(path) as writer:
        writer.tensors("model", {"w": torch.arange(6).reshape(2, 3), "scalar": torch.tensor(2.5)})
        writer.table("users/ünï", blocks(sizes), dim=2, state_width=1, dtype="float32")
        writer.table("empty", blocks([]), dim=3, state_width=0, dtype="float32")
        writer.facts["step"] = 12
    return path


def test_nothing_else_is_removed(tmp_path, monkeypatch):
    """A place with other files is refused: also a run's folder of checkpoints."""
    write(tmp_path / "run" / "step-000000012")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    for name, stranger in (("run", "step-000000012"), ("notes", "mine.txt"), ("notes/mine.txt", "mine.txt")):
        with pytest.raises(CheckpointError, match=f"holds '{stranger}', which is not of a checkpoint"):
            write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="choose a new folder"):
        write(".")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"
    assert CheckpointReader(tmp_path / "run" / "step-000000012").facts["step"] == 12
    (tmp_path / "empty").mkdir()
    assert CheckpointReader(write(tmp_path / "empty")).facts["step"] == 12


def test_what_is_written_is_read(tmp_path):
    reader = CheckpointReader(write(tmp_path / "step-000000012"))
    assert reader.facts == {"step": 12}
    assert reader.tensors("model")["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    ((keys, records),) = reader.rows("users/ünï")
    assert keys.tolist() == list(range(-5, 2))
    assert records[:, 2].tolist() == list(range(-5, 2))
    assert (reader.tables["users/ünï"].num_rows, reader.tables["empty"].num_rows) == (7, 0)
    assert list(reader.rows("empty")) == []
    reader.verify()


def test_large_tables_are_cut_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr("rowhaul.checkpoint.shard.FILE_BYTES", 1000)
    reader = CheckpointReader(write(tmp_path / "c", sizes=[30] * 10))
    assert len(reader.tables["users/ünï"].files) == 5
    assert np.concatenate([keys for keys, _ in reader.rows("users/ünï")]).tolist() == list(range(-5, 295))


def test_a_large_table_takes_no_more_memory_than_two_files(tmp_path, monkeypatch):
    """The rows of one, and the same joined; not those of the file before."""
    monkeypatch.setattr("rowhaul.checkpoint.shard.FILE_BYTES", 1 << 20)
    block = 1 << 16
    rows = ((np.arange(i * 500, i * 500 + 500), np.ones((500, 32), np.float32)) for i in range(64))
    tracemalloc.start()
    try:
        with CheckpointWriter(tmp_path / "step-000000001") as writer:
            writer.table("t", rows, dim=32, state_width=0, dtype="float32")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (2 << 20) + 6 * block


def test_an_interrupted_save_leaves_nothing(tmp_path):
    def failing():
        yield from blocks([3])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "step-000000001") as writer:
        writer.table("t", failing(), dim=3, state_width=0, dtype="float32")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_save_left_is_not_taken_for_whole(tmp_path):
    write(tmp_path / "step-000000012")
    unfinished = tmp_path / "step-000000013.unfinished"
    unfinished.mkdir()
    (unfinished / "rows-0000-00000.safetensors").write_bytes(b"half")
    (tmp_path / "step-000000014").mkdir()  # no manifest
    assert latest_checkpoint(tmp_path).name == "step-000000012"
    with pytest.raises(CheckpointError, match=r"is no complete checkpoint: it has no manifest\.json"):
        CheckpointReader(tmp_path / "step-000000014")
    write(tmp_path / "step-000000013")
    assert latest_checkpoint(tmp_path).name == "step-000000013"
    assert not unfinished.exists()


def test_a_complete_checkpoint_is_never_overwritten(tmp_path):
    write(tmp_path / "c")
    with pytest.raises(CheckpointError, match="complete checkpoint already"):
        write(tmp_path / "c")


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
@pytest.mark.parametrize("name", ["rows-0000-00000.safetensors", "tensors-model.safetensors"])
def test_damage_is_named(damage, name, tmp_path):
    path = write(tmp_path / "c") / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-3] ^= 1
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=name):
        CheckpointReader(tmp_path / "c").verify()


def test_other_formats_are_refused(tmp_path):
    path = write(tmp_path / "c") / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["xxh3"]
    path.write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(CheckpointError, match="version 99, but this Rowhaul reads"):
        CheckpointReader(tmp_path / "c")
    path.write_text('{"made_by": "prepare", "files": []}')
    with pytest.raises(CheckpointError, match=r"its manifest\.json is of something else"):
        CheckpointReader(tmp_path / "c")
    for damaged in ("[]", '{"format": "rowhaul-checkpoint"}'):
        path.write_text(damaged)
        with pytest.raises(CheckpointError, match="entries are missing"):
            CheckpointReader(tmp_path / "c")
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        CheckpointReader(tmp_path / "c")


def write_together(path):
    """As two processes do that store a part of the rows each, and one that stores none."""
    folder = prepare(path)
    writers = [ShardWriter(folder, f"r{rank:04d}") for rank in range(3)]
    writers[0].tensors("model", {"w": torch.arange(3)})
    for rank, writer in enumerate(writers[1:], 1):
        keys = np.arange(10, dtype=np.int64) * 2 + rank
        for name in ("users", "items"):
            records = np.repeat(keys[:, None], 3, axis=1) + 0.5
            writer.table(name, [(keys, records)], dim=2, state_width=1, dtype="float64")
    plain = {"masks": np.array([1 << 63], np.uint64), "none": np.zeros((0, 4), np.float32)}
    extra = writers[2].arrays("layout-r0002-00000", plain)
    shards = [Shard.from_json(writer.written.to_json()) for writer in writers]  # as they travel
    return extra, shards


def test_what_several_write_is_one_checkpoint(tmp_path):
    path = tmp_path / "step-000000007"
    extra, shards = write_together(path)
    assert latest_checkpoint(tmp_path) is None
    publish(path, {"step": 7}, shards)
    reader = CheckpointReader(latest_checkpoint(tmp_path))
    reader.verify()
    assert reader.tensors("model")["w"].tolist() == [0, 1, 2]
    assert list(reader.tables) == ["users", "items"]
    for name, table in reader.tables.items():
        assert table.num_rows == 20
        assert np.concatenate(list(reader.keys(name))).tolist() == [*range(1, 21, 2), *range(2, 22, 2)]
        for keys, records in reader.rows(name):
            assert records.tolist() == [[key + 0.5] * 3 for key in keys]
    arrays = reader.arrays(extra)
    assert (arrays["masks"].tolist(), arrays["none"].shape) == ([1 << 63], (0, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000007"]


def test_the_rows_of_one_writer_can_be_read_alone(tmp_path):
    path = tmp_path / "step-000000007"
    _, shards = write_together(path)
    publish(path, {}, shards)
    for rank in (1, 2):
        ((keys, _),) = CheckpointReader(path).rows("items", among=shards[rank].files)
        assert keys.tolist() == list(range(rank, 20 + rank, 2))


def test_a_damaged_file_is_only_missed_where_it_is_read(tmp_path):
    path = tmp_path / "step-000000007"
    extra, shards = write_together(path)
    publish(path, {}, shards)
    (path / extra).write_bytes(b"half")
    reader = CheckpointReader(path)
    assert len(list(reader.rows("items"))) == 2
    with pytest.raises(CheckpointError, match=f"{extra} is damaged"):
        reader.arrays(extra)
    with pytest.raises(CheckpointError, match=r"has no file 'other\.safetensors'"):
        reader.arrays("other.safetensors")


def test_what_interrupted_saves_left_can_be_removed(tmp_path):
    write(tmp_path / "step-000000012")
    (tmp_path / "step-000000013.unfinished").mkdir()
    (tmp_path / "notes.unfinished").mkdir()  # somebody else's
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.unfinished", "step-000000012"]
