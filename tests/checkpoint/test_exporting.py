"""Exported files hold the checkpoint's rows to the bit, in other tools' hands; or there is no export."""

import json
import re
import tracemalloc

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from rowhaul.checkpoint import CheckpointReader, CheckpointWriter
from rowhaul.checkpoint import shard as shards
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.export import export as exporting
from rowhaul.export.export import export
from rowhaul.export.files import FILE_KINDS, FileKind
from rowhaul.store import row_parts

DIM, STATE = 3, 2


@pytest.fixture(params=["float32", "float64"])
def reader(request, tmp_path, monkeypatch):
    """Rows with every kind of number in them, in several files."""
    monkeypatch.setattr(shards, "FILE_BYTES", 2000)
    random = np.random.default_rng(0)
    blocks = []
    for number in range(4):
        keys = random.integers(-(2**63), 2**63 - 1, 50)
        records = random.normal(size=(50, DIM + STATE)).astype(request.param)
        records[number] = [np.nan, np.inf, -0.0, -np.inf, 1e-310]
        blocks.append((keys, records))
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.tensors("model", {"w": torch.arange(6.0).reshape(2, 3), "one": torch.tensor(2.5)})
        writer.tensors("half", {"h": torch.zeros(2, dtype=torch.bfloat16)})
        writer.table("user/ids", blocks, dim=DIM, state_width=STATE, dtype=request.param)
        writer.table("user_ids", [], dim=4, state_width=0, dtype=request.param)
        writer.facts |= {"step": 5, "samples": 1234, "key_kinds": {"user_ids": "text"}}
    return CheckpointReader(tmp_path / "c")


def read_other_way(path):
    """Keys, values and state as a user's own tools read them."""
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        columns = [table[name].combine_chunks() for name in table.column_names]
        assert str(table.schema.field("key").type) == "int64"
        lists = [one.flatten().to_numpy().reshape(len(table), one.type.list_size) for one in columns[1:]]
        return [columns[0].to_numpy(), *lists]
    loaded = safetensors.numpy.load_file(path) if path.suffix == ".safetensors" else np.load(path)
    return [loaded[name] for name in ("keys", "values", "state") if name in loaded]


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("kind", list(FILE_KINDS))
def test_other_tools_read_the_same_bits(kind, with_state, reader, tmp_path):
    made = export(reader, tmp_path / "new" / "x", format=kind, with_state=with_state)
    assert [table.file for table in made.tables] == [
        f"tables/user_ids{FILE_KINDS[kind].suffix}",
        f"tables/user_ids-2{FILE_KINDS[kind].suffix}",
    ]
    blocks = list(reader.rows("user/ids"))
    keys = np.concatenate([one for one, _ in blocks])
    records = np.concatenate([one for _, one in blocks])
    found = read_other_way(made.path / made.tables[0].file)
    expected = [keys, records[:, :DIM]] + ([records[:, DIM:]] if with_state else [])
    assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]
    assert [one.shape for one in found] == [one.shape for one in expected]
    empty = read_other_way(made.path / made.tables[1].file)
    assert [one.shape for one in empty] == [(0,), (0, 4)]
    dense = safetensors.torch.load_file(made.path / "dense.safetensors")
    assert dense["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_manifest_says_what_is_what(reader, tmp_path):
    made = export(reader, tmp_path / "x", tables=["user_ids"])
    manifest = json.loads((made.path / "export.json").read_text())
    assert (manifest["step"], manifest["samples"], manifest["table_format"]) == (5, 1234, "parquet")
    (table,) = manifest["tables"]
    assert (table["name"], table["num_rows"], table["dim"], table["ids"]) == ("user_ids", 0, 4, ["text"])
    assert manifest["dense"]["shapes"] == {"w": [2, 3], "one": []}
    assert "XXH64" in (made.path / "README.md").read_text()


@pytest.mark.parametrize("kind", FILE_KINDS)
@pytest.mark.parametrize("table", ["user/ids", "user_ids"])  # the second has no rows
def test_the_lines_that_come_with_it_read_it(kind, table, reader, tmp_path, monkeypatch):
    made = export(reader, tmp_path / "x", format=kind, tables=[table])
    program, *_ = re.findall(r"```python\n(.*?)```", (made.path / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(made.path)
    found = {}
    exec(program, found)
    blocks = list(reader.rows(table))
    keys = np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in blocks)])
    np.testing.assert_array_equal(found["keys"], keys)
    assert found["values"].shape == (len(keys), reader.tables[table].dim)
    if kind == "npz":
        found["table"].close()


def test_a_file_that_reads_back_otherwise_is_not_kept(reader, tmp_path, monkeypatch):
    plain = FILE_KINDS["npz"]

    def write_wrongly(path, layout, blocks):
        wrong = ({**block, "values": np.nan_to_num(block["values"])} for block in blocks)
        plain.write(path, layout, wrong)

    monkeypatch.setitem(exporting.FILE_KINDS, "npz", FileKind(plain.suffix, write_wrongly, plain.read))
    with pytest.raises(CheckpointError, match=r"'user/ids' reads back from user_ids\.npz otherwise"):
        export(reader, tmp_path / "x", format="npz")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("kind", list(FILE_KINDS))
def test_an_interrupted_export_leaves_nothing(kind, reader, tmp_path):
    def interrupt(done, total):
        if done > total // 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(reader, tmp_path / "x", format=kind, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_what_a_killed_export_left_is_in_nobodys_way(reader, tmp_path):
    (tmp_path / ".tmp-x" / "tables").mkdir(parents=True)
    (tmp_path / ".tmp-x" / "tables" / "old.parquet").write_bytes(b"half")
    export(reader, tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "x"]
    assert not (tmp_path / "x" / "tables" / "old.parquet").exists()


def test_bad_requests_say_what_is_there(reader, tmp_path):
    with pytest.raises(ConfigError, match="no table 'users'; its tables are user/ids, user_ids"):
        export(reader, tmp_path / "x", tables=["users"])
    with pytest.raises(ConfigError, match="choose parquet, safetensors, npz"):
        export(reader, tmp_path / "x", format="csv")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export(reader, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file; choose a new folder for the export"):
        export(reader, tmp_path / "file")


@pytest.mark.parametrize("kind", list(FILE_KINDS))
def test_memory_does_not_grow_with_the_table(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 1 << 18)
    monkeypatch.setattr(row_parts, "BLOCK_ROWS", 1 << 12)
    keys = np.arange(200_000, dtype=np.int64)
    with CheckpointWriter(tmp_path / "c") as writer:
        blocks = ((some, np.ones((len(some), 16), np.float32)) for some in np.split(keys, 50))
        writer.table("t", blocks, dim=16, state_width=0, dtype="float32")
    tracemalloc.start()
    try:
        export(CheckpointReader(tmp_path / "c"), tmp_path / "x", format=kind)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 << 18  # the table is 55 such files
