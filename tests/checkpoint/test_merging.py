"""Merging checkpoints is merging dictionaries of rows, whatever files and parts of the keys it goes by."""

import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_checkpoints import block, record, write

from rowhaul.checkpoint import CheckpointReader, CheckpointWriter
from rowhaul.checkpoint import shard as shards
from rowhaul.checkpoint.merging import merge
from rowhaul.checkpoint.writer import prepare, publish
from rowhaul.errors import CheckpointError

KEYS = st.one_of(st.integers(-4, 4), st.sampled_from([2**63 - 1, -(2**63), 10**12]))
ROWS = st.dictionaries(KEYS, st.integers(0, 1000), max_size=12)
SOURCES = st.lists(
    st.dictionaries(st.sampled_from(["users", "items", "ünï/x"]), ROWS), min_size=1, max_size=4
)


def contents(reader):
    return {
        name: {
            int(key): row.tolist()
            for keys, records in reader.rows(name)
            for key, row in zip(keys, records, strict=True)
        }
        for name in reader.tables
    }


def oracle(sources):
    """Later ones win."""
    merged = {}
    for tables in sources:
        for name, rows in tables.items():
            merged.setdefault(name, {}).update({key: record(value).tolist() for key, value in rows.items()})
    return merged


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sources=SOURCES, keys_in_memory=st.integers(1, 20), file_bytes=st.sampled_from([1, 60, 1 << 20]))
def test_merging_is_updating_a_dictionary(sources, keys_in_memory, file_bytes, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", file_bytes)
    with TemporaryDirectory() as folder:
        readers = [write(Path(folder) / str(number), tables) for number, tables in enumerate(sources)]
        merged = merge(readers, Path(folder) / "to", keys_in_memory=keys_in_memory)
        reader = CheckpointReader(Path(folder) / "to")
        reader.verify()
        assert contents(reader) == oracle(sources)
        for table in merged.tables:
            assert table.rows == sum(table.rows_from) == reader.tables[table.name].num_rows
            assert table.rows + table.replaced == sum(len(one.get(table.name, ())) for one in sources)
            in_later = set()
            for number in reversed(range(len(sources))):
                of_this = sources[number].get(table.name, {}).keys()
                assert table.rows_from[number] == len(of_this - in_later)
                in_later |= of_this


def test_dense_weights_and_facts_are_the_last_ones(tmp_path):
    first = write(tmp_path / "a", {"t": {1: 1}}, weights=[1.0], facts={"step": 5, "key_kinds": {"x": "text"}})
    cluster = {"step": 7, "cluster": {"files": []}, "key_kinds": {"y": "integer"}}
    second = write(tmp_path / "b", {"t": {2: 2}}, weights=[2.0], facts=cluster)
    rows_only = write(tmp_path / "c", {"t": {3: 3}}, facts={"step": 9})
    merged = merge([first, second, rows_only], tmp_path / "to")
    reader = CheckpointReader(tmp_path / "to")
    assert merged.dense_from == second.path
    assert reader.tensors("model")["w"].tolist() == [2.0]
    assert reader.facts["step"] == 7
    assert reader.facts["key_kinds"] == {"x": "text", "y": "int64"}  # as an earlier version says
    assert "cluster" not in reader.facts  # what only the cluster that saved could use


def test_many_small_files_become_few(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 1)
    source = write(tmp_path / "a", {"t": {key: key for key in range(40)}}, blocks_of=1)
    assert len(source.tables["t"].files) == 40
    monkeypatch.undo()
    merged = merge([source], tmp_path / "to")
    assert (merged.tables[0].files_before, merged.tables[0].files) == (40, 1)
    assert contents(CheckpointReader(tmp_path / "to")) == contents(source)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"dim": 1}, "the dim of table 't' is 2 in the first and 1 in the second"),
        ({"dtype": "float64"}, "the type of the rows is float32 in the first and float64"),
        ({"facts": {"row_optimizer": "adam"}}, "the row optimizer is rowwise_adagrad in the first and adam"),
        (
            {"facts": {"key_kinds": {"t": "text"}, "key_origins": True}},
            "feature 't' has text ids, but integer ids",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(other, named, tmp_path):
    facts = {"key_kinds": {"t": "integer"}, "key_origins": True}
    first = write(tmp_path / "a", {"t": {1: 1}}, facts=facts)
    second = write(tmp_path / "b", {"t": {1: 1}}, **other)
    with pytest.raises(CheckpointError, match=named):
        merge([first, second], tmp_path / "to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_damage_is_named_and_leaves_nothing(tmp_path):
    first, second = (write(tmp_path / name, {"t": {1: 1, 2: 2}}) for name in "ab")
    damaged = second.path / second.tables["t"].files[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=f"{damaged} is damaged"):
        merge([first, second], tmp_path / "to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_key_twice_in_one_checkpoint_is_damage(tmp_path):
    folder = prepare(tmp_path / "a")
    writers = [shards.ShardWriter(folder, f"r{rank}") for rank in range(2)]
    for writer in writers:
        writer.table("t", [block({5: 1})], dim=2, state_width=1, dtype="float32")
    publish(tmp_path / "a", {}, [writer.written for writer in writers])
    with pytest.raises(CheckpointError, match="holds the key 5 more than once"):
        merge([CheckpointReader(tmp_path / "a")], tmp_path / "to")


def test_an_interrupted_merge_leaves_nothing(tmp_path):
    source = write(tmp_path / "a", {"t": {1: 1}})

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge([source], tmp_path / "to", interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_memory_does_not_grow_with_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 1 << 18)
    keys = np.arange(100_000, dtype=np.int64)
    sources = []
    for name in "ab":
        with CheckpointWriter(tmp_path / name) as writer:
            blocks = ((some, np.ones((len(some), 16), np.float32)) for some in np.split(keys, 50))
            writer.table("t", blocks, dim=16, state_width=0, dtype="float32")
        sources.append(CheckpointReader(tmp_path / name))
    tracemalloc.start()
    try:
        merged = merge(sources, tmp_path / "to", keys_in_memory=1 << 15)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert merged.tables[0].replaced == 100_000
    assert peak < 12 << 18  # a few files; the checkpoints are 54 files together
