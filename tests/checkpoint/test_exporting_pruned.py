"""Exports of pruned rows: the chunks that there are and nothing else, to the bit, for other tools too."""

import json
import re
import tracemalloc

import numpy as np
import pytest

from rowhaul.checkpoint import CheckpointReader, CheckpointWriter
from rowhaul.checkpoint import shard as shards
from rowhaul.errors import CheckpointError, ConfigError
from rowhaul.export.export import export
from rowhaul.export.files import FILE_KINDS
from rowhaul.export.reader import ExportReader
from rowhaul.optim import row_optimizer
from rowhaul.pruning.deciding.room import chunk_starts
from rowhaul.store import row_parts

# Values of a row, those of them that are stored, chunks, optimizer, type.
SHAPES = {
    "one chunk": (4, 4, 1, "sgd", "float32"),
    "unequal chunks": (7, 7, 3, "rowwise_adagrad", "float32"),
    "some columns, more than eight chunks": (23, 19, 11, "adam", "float64"),
    "a chunk a value": (16, 16, 16, "adagrad", "float32"),
}


def write_checkpoint(folder, shape, share=0.4, num_rows=300, num_blocks=3):
    """A checkpoint of random pruned rows, many of which hold nothing."""
    dim, num_stored, num_chunks, optimizer, dtype = shape
    random = np.random.default_rng(num_rows)
    starts = chunk_starts(num_stored, num_chunks)
    sizes, rule = np.diff(starts), row_optimizer(optimizer, lr=0.1)
    widths = sizes + np.array([rule.state_width(int(size)) for size in sizes])
    columns = np.sort(random.permutation(dim)[:num_stored])

    def blocks():
        for number in range(num_blocks):
            present = random.random((num_rows, num_chunks)) < share
            present[::3] = False
            places = np.nonzero(present)[1]
            chunks = random.normal(size=(len(places), widths.max())).astype(dtype)
            if len(chunks):
                chunks[0, 0], chunks[-1, 0] = np.nan, -0.0
            chunks[np.arange(widths.max()) >= widths[places][:, None]] = 0
            yield {
                "keys": np.arange(num_rows) * 7 - 1000 + number * 10**6,
                "present": present,
                "chunks": chunks,
                "utilities": np.ones(present.shape, np.float32),
                "touched": np.zeros(num_rows, np.int32),
                "columns": columns,
                "starts": starts,
            }

    with CheckpointWriter(folder) as writer:
        writer.facts |= {"step": 5, "samples": 9, "row_optimizer": optimizer}
        writer.facts["pruning"] = {"chunks": num_chunks, "file": "pruning.safetensors"}
        writer.blocks("items", blocks(), dim, 0, dtype, "chunked")
        writer.blocks("none", [], dim, 0, dtype, "chunked")
    return CheckpointReader(folder)


def by_key(blocks):
    return {int(key): row.tobytes() for keys, rows in blocks for key, row in zip(keys, rows, strict=True)}


def held_rows(reader):
    """Whole rows of all keys that hold anything, from the checkpoint."""
    holds = {
        int(key)
        for parts in reader.blocks("items")
        for key, some in zip(parts["keys"], parts["present"], strict=True)
        if some.any()
    }
    return {key: row for key, row in by_key(reader.rows("items")).items() if key in holds}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("kind", list(FILE_KINDS))
def test_whole_rows_come_back_and_the_readme_says_how(kind, shape, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 4000)
    reader = write_checkpoint(tmp_path / "c", shape)
    made = export(reader, tmp_path / "x", format=kind)
    expected = held_rows(reader)
    assert 0 < len(expected) < reader.tables["items"].num_rows
    exported = ExportReader(made.path)
    assert by_key(exported.rows("items")) == expected
    assert list(exported.rows("none")) == []
    assert exported.tables["items"].num_rows == len(expected)
    assert exported.tables["items"].file_layout().rows_left_out == 900 - len(expected)
    readme = (made.path / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    monkeypatch.chdir(made.path)
    found = {}
    exec(program, found)
    assert by_key([(found["keys"], found["rows"])]) == expected


@pytest.mark.parametrize("kind", list(FILE_KINDS))
def test_state_is_that_of_each_chunk(kind, tmp_path):
    shape = SHAPES["some columns, more than eight chunks"]
    reader = write_checkpoint(tmp_path / "c", shape)
    made = export(reader, tmp_path / "x", format=kind, with_state=True)
    table = ExportReader(made.path).tables["items"]
    layout = table.file_layout()
    assert (table.state_width, layout.state_widths) == (38, (4,) * 8 + (2,) * 3)
    sizes = np.diff(layout.starts)
    parts = list(reader.blocks("items"))
    expected = [
        chunk[size : 3 * size].tobytes()
        for part in parts
        for place, chunk in zip(np.nonzero(part["present"])[1], part["chunks"], strict=True)
        for size in [sizes[place]]
    ]
    blocks = list(ExportReader(made.path).blocks("items"))
    assert b"".join(block["state"].tobytes() for block in blocks) == b"".join(expected)


@pytest.mark.parametrize("kind", list(FILE_KINDS))
def test_files_shrink_as_rows_are_pruned(kind, tmp_path):
    """A file is its keys, a bit a chunk and the values that there are, and a little that says so."""
    shape, sizes = (32, 32, 4, "rowwise_adagrad", "float32"), {}
    for share in (1.0, 0.5, 0.1):
        reader = write_checkpoint(tmp_path / f"c{share}", shape, share, num_rows=3000)
        made = export(reader, tmp_path / f"x{share}", format=kind, tables=["items"])
        (table,) = made.tables
        needed = table.num_rows * 9 + table.details["num_values"] * 4
        assert table.bytes <= 1.02 * needed + 5000
        sizes[share] = table.bytes
    assert sizes[0.5] < 0.56 * sizes[1.0]
    assert sizes[0.1] < 0.15 * sizes[1.0]
    reader = CheckpointReader(tmp_path / "c0.1")
    whole = export(reader, tmp_path / "whole", format=kind, tables=["items"], whole_rows=True)
    assert by_key(ExportReader(whole.path).rows("items")) == by_key(reader.rows("items"))


def test_memory_does_not_grow_with_a_pruned_table(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 1 << 18)
    monkeypatch.setattr(row_parts, "BLOCK_ROWS", 1 << 12)
    reader = write_checkpoint(tmp_path / "c", (16, 16, 4, "sgd", "float32"), num_rows=2000, num_blocks=100)
    tracemalloc.start()
    try:
        for kind in FILE_KINDS:
            made = export(reader, tmp_path / kind, format=kind)
            assert sum(len(keys) for keys, _ in ExportReader(made.path).rows("items")) > 100_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 << 18  # the table is about 70 such files


@pytest.mark.parametrize("kind", list(FILE_KINDS))
def test_damage_is_named_and_nothing_is_believed_to_the_end(kind, tmp_path):
    reader = write_checkpoint(tmp_path / "c", SHAPES["unequal chunks"])
    made = export(reader, tmp_path / "x", format=kind)
    path = made.path / made.tables[0].file
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)
    with pytest.raises(CheckpointError, match=rf"tables/items\{path.suffix} "):
        list(ExportReader(made.path).rows("items"))
    path.write_bytes(contents[: len(contents) // 2])
    with pytest.raises(CheckpointError, match=rf"tables/items\{path.suffix} "):
        list(ExportReader(made.path).rows("items"))
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        list(ExportReader(made.path).rows("items"))


def test_bad_requests_of_pruned_exports_say_why(tmp_path):
    reader = write_checkpoint(tmp_path / "c", SHAPES["unequal chunks"])
    with pytest.raises(ConfigError, match="whole rows have none"):
        export(reader, tmp_path / "x", whole_rows=True, with_state=True)
    made = export(reader, tmp_path / "x")
    exported = ExportReader(made.path)
    with pytest.raises(ConfigError, match="no table 'user'; its tables are items, none"):
        list(exported.rows("user"))
    with pytest.raises(CheckpointError, match="is no export: it has no"):
        ExportReader(tmp_path / "c")
    manifest = made.path / "export.json"
    given = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**given, "version": 1}))
    with pytest.raises(CheckpointError, match="version 1, but this Rowhaul reads"):
        ExportReader(made.path)
    manifest.write_text(json.dumps({**given, "tables": [{"name": "items"}]}))
    with pytest.raises(CheckpointError, match="is damaged"):
        ExportReader(made.path)
    manifest.write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        ExportReader(made.path)
