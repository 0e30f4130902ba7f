"""Resumed runs know their data: files may be added at the end, but not change."""

import json
import os
from dataclasses import replace
from itertools import count

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from click_logs import click_log
from rowhaul.checkpoint import CheckpointReader, latest_checkpoint
from rowhaul.data.schema import Schema
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError, DataError
from rowhaul.train import train_run
from rowhaul.train.config import ModelConfig, RateSchedule, TrainConfig
from rowhaul.train.run_data import remembered_data
from rowhaul.train.trainer import Trainer

CONFIG = TrainConfig(model=ModelConfig(embedding_dim=4, options={"top": [8]}), batch_size=500)


@pytest.fixture
def data(tmp_path):
    """Two files of 3000 samples."""
    folder = tmp_path / "data"
    folder.mkdir()
    for part in range(2):
        pq.write_table(click_log(3000, part), folder / f"part-{part}.parquet", row_group_size=700)
    return folder


def weights(run):
    reader = CheckpointReader(latest_checkpoint(run / "checkpoints"))
    rows = {
        table: {int(k): row.tobytes() for keys, records in reader.rows(table)
                for k, row in zip(keys, records, strict=True)}
        for table in reader.tables
    }  # fmt: skip
    return rows, {name: one.numpy().tobytes() for name, one in reader.tensors("model").items()}


@pytest.mark.parametrize("max_steps", [0, 4], ids=["finished", "in the first epoch"])
def test_files_added_at_the_end_extend_a_run(max_steps, data, log_schema, tmp_path):
    first, both = data / "part-0.parquet", [data / "part-0.parquet", data / "part-1.parquet"]
    train_run(replace(CONFIG, max_steps=max_steps), log_schema, first, out=tmp_path / "run")
    result = train_run(CONFIG, log_schema, both, out=tmp_path / "run", resume=True)
    assert result.step == 12
    assert "1 data files were added at the end, from part-1.parquet on: 3,000 samples" in result.note
    train_run(CONFIG, log_schema, both, out=tmp_path / "at once")
    assert weights(tmp_path / "run") == weights(tmp_path / "at once")
    again = train_run(CONFIG, log_schema, both, out=tmp_path / "run", resume=True)
    assert (again.steps_taken, again.note) == (0, "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shuffle_rows": 1000}, "with shuffling the order of the samples depends on all files"),
        ({"epochs": 2}, "the run is beyond its first epoch"),
        ({"rates": RateSchedule(decay="linear")}, "the learning rates decay"),
    ],
)
def test_files_are_not_added_where_the_order_would_change(changes, reason, data, log_schema, tmp_path):
    config = replace(CONFIG, **changes)
    train_run(config, log_schema, data / "part-0.parquet", out=tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"part-1.parquet was added .* but {reason}"):
        train_run(config, log_schema, data, out=tmp_path / "run", resume=True)


def test_changed_and_removed_files_are_named(data, log_schema, tmp_path):
    run = tmp_path / "run"
    train_run(replace(CONFIG, max_steps=2), log_schema, data, out=run)
    with pytest.raises(CheckpointError, match=r"part-1.parquet is gone"):
        train_run(CONFIG, log_schema, data / "part-0.parquet", out=run, resume=True)
    files = [data / "part-1.parquet", data / "part-0.parquet"]
    moved = r"part-0.parquet is not at its place: file 1 is part-1.parquet"
    with pytest.raises(CheckpointError, match=moved):
        train_run(CONFIG, log_schema, files, out=run, resume=True)
    pq.write_table(click_log(2900, 5), data / "part-1.parquet", row_group_size=700)
    with pytest.raises(
        CheckpointError, match=r"part-1.parquet has changed \(3,000 rows in .*, now 2,900 rows"
    ):
        train_run(CONFIG, log_schema, data, out=run, resume=True)


def plain(path, users):
    """A file whose size and footer do not depend on its values."""
    table = pa.table({"click": np.arange(len(users)) % 2, "user": users, "item": users})
    options = {"use_dictionary": False, "compression": "none", "write_statistics": False}
    pq.write_table(table, path, row_group_size=500, **options)


def test_other_values_in_a_file_that_looks_the_same_are_noticed(tmp_path):
    path, run = tmp_path / "log.parquet", tmp_path / "run"
    schema = Schema.from_dict({"label": "click", "ids": ["user", "item"]})
    users = np.arange(2000) % 50
    plain(path, users)
    train_run(replace(CONFIG, max_steps=3), schema, path, out=run)
    contents = json.loads((run / "contents.json").read_text())
    assert len(contents[0]["column_digests"]) >= 3
    os.utime(path, ns=(1, 1))  # as a copy has: its contents are compared
    train_run(replace(CONFIG, max_steps=3), schema, path, out=run, resume=True)
    other = users.copy()
    other[10] = 49
    plain(path, other)
    with pytest.raises(DataError, match=r"log.parquet has changed since training read it: row group 0"):
        train_run(CONFIG, schema, path, out=run, resume=True)
    plain(path, users)
    assert train_run(CONFIG, schema, path, out=run, resume=True).step == 4


def test_a_later_epoch_must_read_the_same(tmp_path):
    path, schema = tmp_path / "log.parquet", Schema.from_dict({"label": "click", "ids": ["user"]})
    users = np.arange(2000) % 50
    plain(path, users)
    stream = SampleStream(path, schema, 100)
    assert len(list(stream)) == len(list(stream)) == 20
    users[1999] = 7
    plain(path, users)
    with pytest.raises(DataError, match="has changed since training read it: row group 3"):
        list(stream)


def test_a_file_that_was_read_may_be_removed(data, log_schema, tmp_path):
    stream = SampleStream(data, log_schema, 500)
    sizes, groups = [one.stat().st_size for one in stream.files], [700, 700, 700, 700, 200] * 2
    before = stream.fingerprint
    assert before == xxhash.xxh3_64_hexdigest(repr((sizes, groups)).encode())

    def rotate():
        if next(calls) >= 8:  # batches from the seventh on are of the second file
            (data / "part-0.parquet").unlink(missing_ok=True)
        return False

    calls = count()
    assert train_run(CONFIG, log_schema, data, out=tmp_path / "run", should_stop=rotate).step == 12
    assert not (data / "part-0.parquet").exists()
    reader = CheckpointReader(latest_checkpoint(tmp_path / "run" / "checkpoints"))
    assert (reader.facts["step"], reader.facts["data"], stream.fingerprint) == (12, before, before)


def test_checkpoints_of_earlier_versions_keep_their_rule(data, log_schema, tmp_path):
    run = tmp_path / "run"
    train_run(replace(CONFIG, max_steps=2), log_schema, data, out=run)
    for path in run.glob("checkpoints/*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["facts"]["data_files"], manifest["xxh3"]
        path.write_text(json.dumps(manifest))
    for name in ("contents.json", "data.yaml"):
        (run / name).unlink()
    assert remembered_data(run) is None
    with pytest.raises(CheckpointError, match="was trained on other files"):
        train_run(CONFIG, log_schema, data / "part-0.parquet", out=run, resume=True)
    assert train_run(CONFIG, log_schema, data, out=run, resume=True).step == 12


def test_paths_are_remembered_from_where_they_were_given(data, log_schema, tmp_path, monkeypatch):
    monkeypatch.chdir(data.parent)
    config = replace(CONFIG, max_steps=1)
    train_run(config, log_schema, "data/*.parquet", eval_data=["data/part-1.parquet"], out="run")
    monkeypatch.chdir("/")
    found = remembered_data(tmp_path / "run")
    assert found.data == [f"{tmp_path}/data/*.parquet"]
    assert found.eval_data == [f"{tmp_path}/data/part-1.parquet"]


def test_ids_never_trained_are_counted_by_feature(data, log_schema, tmp_path):
    train, held_out = data / "part-0.parquet", data / "part-1.parquet"
    config = replace(CONFIG, max_steps=1)
    metrics = train_run(config, log_schema, train, eval_data=held_out, out=tmp_path / "run").metrics
    seen, asked = pq.read_table(train).slice(0, 500), pq.read_table(held_out)
    counts = {}
    for name in ("user", "item", "tags"):
        known, read = set(flat(seen[name])), flat(asked[name])
        counts[name] = (sum(one not in known for one in read), len(read))
    assert metrics.unknown_by_feature == {name: some / every for name, (some, every) in counts.items()}
    unknown, every = map(sum, zip(*counts.values(), strict=True))
    assert metrics.unknown_keys == unknown / every > 0
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (line,) = (one for one in lines if one["kind"] == "eval")
    assert line["unknown_by_feature"] == metrics.unknown_by_feature
    stream = SampleStream(held_out, log_schema, 100)
    assert Trainer(CONFIG, log_schema).evaluate(stream).unknown_keys == 1


def flat(column):
    values = column.combine_chunks()
    return (values.flatten() if pa.types.is_list(values.type) else values).drop_null().to_pylist()
