"""Runs that learn from a stream: a folder that grows, lines of JSON; equal to files, to the bit."""

import json
import os
import threading
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_trainer import state_bytes

from click_logs import click_log
from rowhaul.checkpoint.opening import open_checkpoint
from rowhaul.data.schema import Schema, TimeColumn
from rowhaul.data.sources.lines import LinesSource
from rowhaul.data.sources.live import Idle, LiveStream
from rowhaul.data.stream import SampleStream
from rowhaul.errors import CheckpointError, ConfigError, DataError
from rowhaul.pruning.config import PruneConfig
from rowhaul.train import TrainConfig, load_trained, train_run
from rowhaul.train.config import ModelConfig, RateSchedule
from rowhaul.train.run_stream import check_streamable
from rowhaul.train.session import Listener
from rowhaul.train.stream_config import StreamConfig

FOLLOWED = StreamConfig(follow=True, stop_when_idle="0.3s")
CONFIG = TrainConfig(
    model=ModelConfig(embedding_dim=4), batch_size=256, checkpoint_every=3, keep_checkpoints=99
)
FOLLOWING = replace(CONFIG, stream=FOLLOWED)


@pytest.fixture(scope="module")
def logs(tmp_path_factory, log_schema):
    """Files whose sizes are no multiples of a batch, and a run over them."""
    folder = tmp_path_factory.mktemp("logs")
    for number, size in enumerate((500, 700, 333, 800)):
        pq.write_table(click_log(size, number), folder / f"part-{number + 8}.parquet", row_group_size=150)
    train_run(CONFIG, log_schema, folder, out=folder / "run")
    return folder


def bits(run):
    return state_bytes(load_trained(run))


def notes_of(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if line["kind"] == "note"]


def put(table, folder, name):
    """Write a file elsewhere and rename it into a folder."""
    pq.write_table(table, folder / f".{name}.tmp")
    os.rename(folder / f".{name}.tmp", folder / name)


def killed_at(limit):
    """A `should_stop` that fails when it is asked so often."""
    calls = iter(range(1, 10**6))

    def kill():
        if next(calls) == limit:
            raise RuntimeError("killed")
        return False

    return kill


def once_trained(act):
    """A listener that acts after the first step."""
    listener = Mock(spec=Listener)
    listener.stepped.side_effect = lambda *_: listener.stepped.call_count == 1 and act()
    return listener


def json_lines(table):
    return [json.dumps(row) for row in table.to_pylist()]


def test_files_that_appear_one_by_one_are_learned_as_files_that_were_there(tmp_path, logs, log_schema):
    incoming = tmp_path / "incoming"
    incoming.mkdir()

    def write():
        for path in sorted(logs.glob("*.parquet"), key=lambda path: int(path.stem[5:])):
            put(pq.read_table(path), incoming, path.name)
            time.sleep(0.1)

    writer = threading.Thread(target=write)
    writer.start()
    patient = replace(CONFIG, stream=replace(FOLLOWED, stop_when_idle="3s"))  # a writer may be slow
    result = train_run(patient, log_schema, incoming, out=tmp_path / "run")
    writer.join()
    assert (result.samples, result.interrupted) == (2333, False)
    assert not (tmp_path / "run" / "set_aside.jsonl").exists()
    assert bits(tmp_path / "run") == bits(logs / "run")


def test_a_stream_that_ends_at_a_checkpoint_is_not_told_that_it_is_missing(tmp_path, log_schema):
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    put(click_log(3 * 256, 0), incoming, "part-0.parquet")
    train_run(FOLLOWING, log_schema, incoming, out=tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000003"]
    assert notes_of(tmp_path / "run") == []


def test_a_killed_run_trains_every_sample_once(tmp_path, logs, log_schema):
    """Killed twice, between checkpoints, the second time within a file of which a part was trained."""
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    for path in logs.glob("*.parquet"):
        put(pq.read_table(path), incoming, path.name)
    for resume, limit in ((False, 5), (True, 3)):
        kill = killed_at(limit)
        with pytest.raises(RuntimeError, match="killed"):
            train_run(FOLLOWING, log_schema, incoming, out=tmp_path / "run", resume=resume, should_stop=kill)
    assert open_checkpoint(tmp_path / "run").facts["stream_position"]["source"]["rows"] == 268
    (incoming / "part-8.parquet").unlink()  # read to its end: it may go
    result = train_run(FOLLOWING, log_schema, incoming, out=tmp_path / "run", resume=True)
    assert result.samples == 2333
    assert bits(tmp_path / "run") == bits(logs / "run")


def test_a_stream_within_a_memory_budget_is_learned_as_files(tmp_path, logs, log_schema):
    """Rows change hands all the time here; a run that is killed and resumed gives the same ids rows."""
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    for path in logs.glob("*.parquet"):
        put(pq.read_table(path), incoming, path.name)
    budget = PruneConfig(budget="12KiB", period=2)
    train_run(replace(CONFIG, prune=budget), log_schema, logs, out=tmp_path / "files")
    following = replace(FOLLOWING, prune=budget)
    with pytest.raises(RuntimeError, match="killed"):
        train_run(following, log_schema, incoming, out=tmp_path / "run", should_stop=killed_at(5))
    result = train_run(following, log_schema, incoming, out=tmp_path / "run", resume=True)
    assert result.samples == 2333
    assert bits(tmp_path / "run") == bits(tmp_path / "files")


def test_bad_files_are_set_aside_and_the_run_goes_on(tmp_path, logs, log_schema):
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    for path in logs.glob("*.parquet"):
        put(pq.read_table(path), incoming, path.name)
    whole = click_log(300, 5)
    put(whole.drop_columns(["price"]), incoming, "part-9a.parquet")
    put(whole.set_column(2, "user", pa.array(["x"] * 300)), incoming, "part-9b.parquet")
    (incoming / "part-9c.parquet").write_bytes(b"PAR1 and no more")
    os.utime(incoming / "part-9c.parquet", (1, 1))
    train_run(FOLLOWING, log_schema, incoming, out=tmp_path / "run")
    assert bits(tmp_path / "run") == bits(logs / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "set_aside.jsonl").read_text().splitlines()]
    assert [Path(line["where"]).stem for line in lines] == ["part-9a", "part-9b", "part-9c"]
    assert "no column 'price'" in lines[0]["why"]
    assert "holds text ids, but integer ids so far" in lines[1]["why"]
    assert "not a whole Parquet file" in lines[2]["why"]
    assert open_checkpoint(tmp_path / "run").facts["stream_position"]["set_aside"] == 3
    assert sum("set aside" in note for note in notes_of(tmp_path / "run")) == 3


def test_lines_of_json_are_learned_as_files(tmp_path, logs, log_schema):
    lines = []
    for path in sorted(logs.glob("*.parquet"), key=lambda path: int(path.stem[5:])):
        lines += json_lines(pq.read_table(path))
    good = len(lines)
    bad = ["{", "[1]", lines[7].replace('"price"', '"prize"'), lines[7].replace('"click": ', '"click": 7')]
    bad += [json.dumps({**json.loads(lines[7]), "user": "seven"})]
    bad += [json.dumps({**json.loads(lines[7]), "tags": [1.5]})]
    for place, line in enumerate(bad):
        lines.insert(300 * place + 5, line)
    reader, writer = os.pipe()

    def write():
        with os.fdopen(writer, "w") as pipe:
            pipe.write("\n".join(lines))

    thread = threading.Thread(target=write)
    thread.start()
    source = LinesSource(log_schema, {}, reader)
    stream = LiveStream(source, log_schema, 256)
    batches = [one for one in stream.prepared(lambda samples: samples) if not isinstance(one, Idle)]
    thread.join()
    os.close(reader)
    assert [len(one) for one in batches] == [256] * 9 + [good - 9 * 256]
    came = stream.position.pop("came")
    assert 0 <= time.time() - came < 600
    assert stream.position == {"source": {"lines": good + len(bad)}, "set_aside": len(bad), "early_cuts": 0}
    reasons = [one.why for one in stream.set_aside]
    expected_reasons = ["not JSON", "not a JSON object", "no field 'price'", "label 'click' is 7"]
    expected_reasons += ["so far", "'tags' is [1.5]"]
    for found, expected in zip(reasons, expected_reasons, strict=True):
        assert expected in found
    for one, other in zip(batches, SampleStream(logs, log_schema, 256), strict=True):
        for name in ("values", "lengths", "dense", "labels", "index"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name


def test_max_wait_cuts_batches_which_is_recorded(tmp_path, log_schema):
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    put(click_log(300, 1), incoming, "a.parquet")
    stream = StreamConfig(follow=True, max_wait="0.1s", stop_when_idle="1s")
    result = train_run(replace(CONFIG, stream=stream), log_schema, incoming, out=tmp_path / "run")
    assert (result.step, result.samples) == (2, 300)
    assert open_checkpoint(tmp_path / "run").facts["stream_position"]["early_cuts"] == 1
    assert any("cut at 44 of 256 samples" in note for note in notes_of(tmp_path / "run"))


def test_a_run_stopped_while_it_waits_is_saved_without_the_samples_of_a_batch_that_is_not_full(
    tmp_path, logs, log_schema
):
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    put(pq.read_table(logs / "part-8.parquet"), incoming, "part-8.parquet")
    config = replace(FOLLOWING, stream=replace(FOLLOWED, stop_when_idle=""))
    listener, asked = Mock(spec=Listener), count()
    stopped = train_run(
        config, log_schema, incoming, out=tmp_path / "run", listener=listener,
        should_stop=lambda: listener.stepped.called and next(asked) > 5,
    )  # fmt: skip
    assert (stopped.interrupted, stopped.samples) == (True, 256)
    for number in (9, 10, 11):
        put(pq.read_table(logs / f"part-{number}.parquet"), incoming, f"part-{number}.parquet")
    train_run(FOLLOWING, log_schema, incoming, out=tmp_path / "run", resume=True)
    assert bits(tmp_path / "run") == bits(logs / "run")


def test_a_file_that_comes_late_is_set_aside(tmp_path, log_schema):
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    put(click_log(300, 1), incoming, "part-10.parquet")
    config = replace(CONFIG, stream=replace(FOLLOWED, stop_when_idle="1s"))
    come_late = once_trained(lambda: put(click_log(300, 2), incoming, "part-9.parquet"))
    result = train_run(config, log_schema, incoming, out=tmp_path / "run", listener=come_late)
    assert result.samples == 300
    assert "sorts before part-10.parquet" in (tmp_path / "run" / "set_aside.jsonl").read_text()


def test_the_first_file_needs_no_number(tmp_path, log_schema):
    """As where all files are there from the start."""
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    put(click_log(300, 1), incoming, "clicks.parquet")
    config = replace(CONFIG, stream=replace(FOLLOWED, stop_when_idle="1s"))
    more = once_trained(lambda: put(click_log(300, 2), incoming, "clicks2.parquet"))
    result = train_run(config, log_schema, incoming, out=tmp_path / "run", listener=more)
    assert result.samples == 600
    train_run(CONFIG, log_schema, incoming, out=tmp_path / "files")
    assert bits(tmp_path / "run") == bits(tmp_path / "files")


def test_what_does_not_go_together_is_refused(tmp_path, logs, log_schema):
    for changes, name in (
        ({"epochs": 2}, "epochs"),
        ({"shuffle_rows": 10}, "shuffle_rows"),
        ({"rates": RateSchedule(decay="linear")}, "rates.decay"),
    ):
        with pytest.raises(ConfigError, match=f"{name} does not go together with a stream"):
            train_run(replace(FOLLOWING, **changes), log_schema, logs, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"prune\.ratio does not go together .*--memory-budget"):
        check_streamable(replace(FOLLOWING, prune=PruneConfig(ratio="90%", tail="shared")))
    with pytest.raises(ConfigError, match="a stream is read by itself"):
        train_run(CONFIG, log_schema, ["-", str(logs)], out=tmp_path / "run")
    with pytest.raises(DataError, match="no such folder to follow"):
        train_run(FOLLOWING, log_schema, tmp_path / "none", out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"stream\.max_wait"):
        StreamConfig(max_wait="0s")
    with pytest.raises(CheckpointError, match="was trained on files"):
        train_run(FOLLOWING, log_schema, logs, out=logs / "run", resume=True)


def test_a_folder_of_files_of_another_schema_is_an_error(tmp_path, logs):
    other = Schema.from_dict({"label": "bought", "ids": ["user", "item"]})
    with pytest.raises(DataError, match=r"does not fit the schema.*no column 'bought'"):
        train_run(FOLLOWING, other, logs, out=tmp_path / "run")


@pytest.mark.slow
def test_rows_live_as_long_by_the_time_at_which_files_came_as_by_that_of_events(tmp_path, log_schema):
    timed = replace(log_schema, time=TimeColumn("at"))
    for number in range(6):
        table, when = click_log(200, number), 1_700_000_000 + 60 * number
        path = tmp_path / f"part-{number}.parquet"
        pq.write_table(table.append_column("at", pa.array([when] * len(table))), path)
        os.utime(path, (when, when))
    aged = replace(FOLLOWING, batch_size=100, tables={"default": {"ttl": "100s"}})
    by_clock, by_event, kept = (
        bits(train_and_open(config, schema, tmp_path, tmp_path.parent / f"run-{number}"))
        for number, (config, schema) in enumerate(
            ((aged, log_schema), (aged, timed), (replace(aged, tables={}), timed))
        )
    )
    assert by_clock == by_event
    assert by_clock != kept


def train_and_open(config, schema, data, out):
    train_run(config, schema, data, out=out)
    return out


def test_files_need_times_where_rows_live_for_days(tmp_path, logs, log_schema):
    with pytest.raises(ConfigError, match="add `time: COLUMN` to it, or give ttl as a number of steps"):
        train_run(replace(CONFIG, tables={"default": {"ttl": "3d"}}), log_schema, logs, out=tmp_path / "run")
