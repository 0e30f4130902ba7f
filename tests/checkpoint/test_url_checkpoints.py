"""Checkpoints at URLs: the same as in folders, but for renaming."""

import json

import fsspec
import numpy as np
import pytest
import row_checkpoints

from rowhaul.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    ShardWriter,
    Url,
    as_place,
    latest_checkpoint,
)
from rowhaul.checkpoint.describing import damaged_files, describe
from rowhaul.checkpoint.finding import find_rows
from rowhaul.checkpoint.layout import finished_checkpoints, remove_unfinished
from rowhaul.checkpoint.location import local_folder, storage_of
from rowhaul.checkpoint.merging import merge
from rowhaul.checkpoint.opening import beside, open_checkpoint, run_of
from rowhaul.checkpoint.writer import discard, prepare, publish, remove, set_aside
from rowhaul.errors import CheckpointError, ConfigError, DamagedCheckpointError, StorageError

ROWS = {key: float(key) for key in range(40)}


@pytest.fixture
def root():
    fsspec.filesystem("memory").store.clear()
    yield "memory://bucket/run"
    fsspec.filesystem("memory").store.clear()


def names(root):
    return sorted(fsspec.filesystem("memory").find(root))


def write(path, rows=ROWS):
    return row_checkpoints.write(
        path, {"items": rows}, weights=[1.0, 2.0], facts={"step": int(str(path)[-9:])}
    )


def test_what_is_written_to_a_url_is_read(root, tmp_path):
    reader, local = write(f"{root}/step-000000010"), write(tmp_path / "step-000000010")
    reader.verify()
    assert str(reader.path) == "memory://bucket/run/step-000000010"
    assert reader.facts == local.facts
    assert reader.file_bytes == local.file_bytes
    assert reader.tensors("model")["w"].tolist() == [1.0, 2.0]
    for (keys, records), (expected_keys, expected) in zip(
        reader.rows("items"), local.rows("items"), strict=True
    ):
        assert (keys == expected_keys).all()
        assert (records == expected).all()
    assert find_rows(reader, "items", [7, 99])[7].values.tolist() == [7.0, -7.0]
    assert describe(reader).tables[0].rows == 40
    assert damaged_files(reader) == {}
    assert run_of(reader) is None


def test_files_are_the_same_bytes_as_in_a_folder(root, tmp_path):
    write(f"{root}/step-000000010")
    write(tmp_path / "step-000000010")
    for path in (tmp_path / "step-000000010").iterdir():
        assert fsspec.filesystem("memory").cat(f"{root}/step-000000010/{path.name}") == path.read_bytes()


def test_a_run_at_a_url_is_its_newest_checkpoint(root):
    for step in (10, 20, 100):
        write(f"{root}/step-{step:09d}")
    assert latest_checkpoint(root) == Url(f"{root}/step-000000100")
    assert open_checkpoint(f"{root}/").facts["step"] == 100
    assert open_checkpoint(f"{root}/step-000000020").facts["step"] == 20
    assert [one.name for one in beside(open_checkpoint(root))] == [f"step-{n:09d}" for n in (10, 20, 100)]
    with pytest.raises(CheckpointError, match="is no checkpoint, and holds no complete one"):
        open_checkpoint("memory://elsewhere/run")


def test_an_upload_that_breaks_off_leaves_the_checkpoint_before(root):
    write(f"{root}/step-000000010")

    def failing():
        yield np.arange(3), np.zeros((3, 3), np.float32)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), CheckpointWriter(f"{root}/step-000000020") as writer:
        writer.table("t", failing(), dim=3, state_width=0, dtype="float32")
    assert [one.name for one in finished_checkpoints(root)] == ["step-000000010"]
    assert not any("step-000000020" in name for name in names(root))


def test_what_a_killed_save_left_is_removed(root):
    write(f"{root}/step-000000010")
    fsspec.filesystem("memory").pipe(f"{root}/step-000000020/rows-0000-00000.safetensors", b"half")
    fsspec.filesystem("memory").pipe(f"{root}/step-000000020/rows-0000-00007.safetensors", b"more")
    fsspec.filesystem("memory").pipe(f"{root}/notes/mine", b"of somebody else")
    assert open_checkpoint(root).facts["step"] == 10
    write(f"{root}/step-000000020")
    assert not any("00007" in name for name in names(root))
    fsspec.filesystem("memory").pipe(f"{root}/step-000000030/rows-0000-00000.safetensors", b"half")
    remove_unfinished(root)
    assert not any("step-000000030" in name for name in names(root))
    assert any("notes/mine" in name for name in names(root))
    assert len(finished_checkpoints(root)) == 2


@pytest.mark.parametrize("name", ["step-000000010/manifest.json", "config.json", "rows-0.part"])
def test_only_unfinished_checkpoints_are_removed(root, name):
    filesystem, place = fsspec.filesystem("memory"), as_place(root) / "step-000000007"
    filesystem.pipe(f"{place}/{name}", b"of somebody else")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"holds '{name.partition('/')[0]}', which is not of a"):
            write(place)
        assert any(name in one for one in names(str(place)))
        filesystem.pipe(f"{place}/rows-0000-00000.safetensors", b"half")
    filesystem.rm(f"{place}/{name.partition('/')[0]}", recursive=True)
    write(place)


def test_somebody_elses_safetensors_are_not_removed(root):
    place = as_place(root) / "step-000000007"
    fsspec.filesystem("memory").pipe(f"{place}/model.safetensors", b"of somebody else")
    with pytest.raises(CheckpointError, match=r"holds 'model\.safetensors'"):
        write(place)


@pytest.mark.parametrize(
    "name",
    ["mine.safetensors", "rows-backup.safetensors", "rows-0000.safetensors", "my-damaged-manifest.json"],
)
def test_files_beside_those_of_an_unfinished_checkpoint_are_not_removed(root, name):
    filesystem, place = fsspec.filesystem("memory"), as_place(root) / "step-000000007"
    for own in ("rows-0000-w0002-00001", "tensors-model", "layout-r0001-00000", "ledger-r0000", "schedule"):
        filesystem.pipe(f"{place}/{own}.safetensors", b"half")
    filesystem.pipe(f"{place}/{name}", b"of somebody else")
    with pytest.raises(CheckpointError, match=f"holds '{name}', which is not of a"):
        write(place)
    remove_unfinished(root)
    assert any(one.endswith(name) for one in names(str(place)))
    filesystem.rm_file(f"{place}/{name}")
    write(place)
    assert not any("schedule" in one for one in names(root))


def test_names_that_anybody_may_choose_count_only_beside_others_or_in_a_steps_folder(root):
    for name in ("mine", "step-000000007"):
        fsspec.filesystem("memory").pipe(f"{root}/{name}/schedule.safetensors", b"of somebody else")
    with pytest.raises(CheckpointError, match=r"holds 'schedule\.safetensors'"):
        prepare(as_place(root) / "mine")
    remove_unfinished(root)
    assert [one.rpartition("/")[0] for one in names(root)] == ["/bucket/run/mine"]


@pytest.mark.parametrize("listing", ["without sizes", "none"])
def test_storage_without_sizes_is_read(listing, root, monkeypatch):
    """As a web server, which lists files without sizes, or none."""
    path = f"{root}/step-000000010"
    write(path)
    files = type(fsspec.filesystem("memory"))
    list_whole = files.ls

    def ls(self, *arguments, **given):
        found = list_whole(self, *arguments, **given) if listing != "none" else []
        return [{**one, "size": None} for one in found]

    monkeypatch.setattr(files, "ls", ls)
    open_checkpoint(path).verify()
    fsspec.filesystem("memory").rm_file(f"{path}/rows-0000-00000.safetensors")
    with pytest.raises(DamagedCheckpointError, match=r"rows-0000-00000\.safetensors is missing"):
        open_checkpoint(path).verify()


def test_a_storage_that_sends_whole_files_is_read(root, monkeypatch):
    reader = write(f"{root}/step-000000010")
    files = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(
        files, "cat_file", lambda self, path, start=None, end=None: self.store[path].getvalue()
    )
    assert find_rows(reader, "items", [7])[7].values.tolist() == [7.0, -7.0]


def test_several_write_one_checkpoint(root):
    path = as_place(f"{root}/step-000000007")
    writers = [ShardWriter(prepare(path) if not rank else path, f"r{rank:04d}") for rank in range(2)]
    for rank, writer in enumerate(writers):
        keys = np.arange(5) * 2 + rank
        writer.table("t", [(keys, np.repeat(keys[:, None], 2, 1).astype(float))], 2, 0, "float64")
    assert latest_checkpoint(root) is None
    publish(path, {}, [writer.written for writer in writers])
    found = np.concatenate([keys for keys, _ in CheckpointReader(path).rows("t")])
    assert sorted(found.tolist()) == list(range(10))
    with pytest.raises(CheckpointError, match="complete checkpoint already"):
        prepare(path)
    remove(path)
    assert names(root) == []
    discard(path)  # of what is not there


def test_a_damaged_one_is_set_aside(root, tmp_path):
    for place in (as_place(root), tmp_path):
        write(place / "step-000000010")
        write(place / "step-000000020")
        set_aside(place / "step-000000020")
        assert [one.name for one in finished_checkpoints(place)] == ["step-000000010"]
        write(place / "step-000000020")
        set_aside(place / "step-000000020")
        remove_unfinished(place)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000010"]
    assert not any("step-000000020" in name for name in names(root))


def test_checkpoints_at_urls_merge(root, tmp_path):
    first = write(f"{root}/a/step-000000001", {1: 1.0, 2: 2.0})
    second = write(tmp_path / "step-000000002", {2: 5.0, 3: 3.0})
    merged = merge([first, second], f"{root}/merged")
    assert merged.path == Url(f"{root}/merged")
    rows = CheckpointReader(merged.path).rows("items")
    rows = {
        key: record[0] for keys, records in rows for key, record in zip(keys.tolist(), records, strict=True)
    }
    assert rows == {1: 1.0, 2: 5.0, 3: 3.0}


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "manifest"])
def test_damage_at_a_url_is_named(damage, root):
    write(f"{root}/step-000000010")
    write(f"{root}/step-000000020")
    files = fsspec.filesystem("memory")
    name = "manifest.json" if damage == "manifest" else "rows-0000-00000.safetensors"
    path = f"{root}/step-000000020/{name}"
    content = bytearray(files.cat(path))
    content[-9] ^= 1
    if damage == "gone":
        files.rm_file(path)
    else:
        files.pipe(path, bytes(content[:-2] if damage == "cut" else content))
    with pytest.raises(DamagedCheckpointError, match=f"step-000000020/{name}"):
        open_checkpoint(root).verify()


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "a/../../b", "", "..", "a\\b", 7])
def test_names_cannot_leave_the_folder(name, tmp_path):
    reader = write(tmp_path / "step-000000001")
    path = reader.path / "manifest.json"
    manifest = json.loads(path.read_text())
    files = manifest["files"]
    entry = files["tensors-model.safetensors"]
    path.write_text(json.dumps({**manifest, "files": {**files, name: entry}, "xxh3": ""}))
    if name == 7:  # JSON makes a text of it, which is a name
        assert "7" in CheckpointReader(reader.path).file_bytes
        return
    with pytest.raises(DamagedCheckpointError, match="names a file outside of its folder"):
        CheckpointReader(reader.path)


def test_a_changed_manifest_is_found(tmp_path):
    path = write(tmp_path / "step-000000012").path / "manifest.json"
    path.write_text(path.read_text().replace('"step": 12', '"step": 13'))
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is damaged: its checksum differs"):
        CheckpointReader(path.parent)


def test_urls_of_folders_are_folders(tmp_path):
    assert as_place(f"file://{tmp_path}/c") == tmp_path / "c"
    assert as_place("a/b") != Url("a/b")
    with pytest.raises(ConfigError, match="lost a slash"):
        as_place("s3:/bucket/run")
    with pytest.raises(ConfigError, match=r"--out s3://bucket/run.*--checkpoints"):
        local_folder("s3://bucket/run")


def test_schemes_are_explained():
    with pytest.raises(ConfigError, match="URL scheme 'nonsense' is not known"):
        open_checkpoint("nonsense://bucket/run")
    with pytest.raises(ConfigError, match=r"gs:// needs a package that is not installed: pip install gcsfs"):
        open_checkpoint("gs://bucket/run")


def test_a_storage_that_fails_is_tried_again(root, monkeypatch):
    url = as_place(f"{root}/step-000000001")
    monkeypatch.setattr("rowhaul.checkpoint.location._PAUSE_SECONDS", 0.0)
    failures = iter([True, True, False, True, True, True])
    files = type(fsspec.filesystem("memory"))
    write_whole = files._open

    def flaky(self, path, mode="rb", *args, **given):
        if mode == "wb" and next(failures):
            raise ConnectionResetError("cut")
        return write_whole(self, path, mode, *args, **given)

    monkeypatch.setattr(files, "_open", flaky)
    writer = ShardWriter(url)
    writer.arrays("first", {"a": np.arange(3)})
    with pytest.raises(
        CheckpointError, match=r"second\.safetensors cannot be written: .*ConnectionResetError: cut"
    ):
        writer.arrays("second", {"a": np.arange(3)})
    assert list(writer.written.files) == ["first.safetensors"]
    assert issubclass(StorageError, OSError)
    assert storage_of(url).sizes(url).keys() == {"first.safetensors"}
