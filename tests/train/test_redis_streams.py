"""Learning from Redis Streams, with a real server: exactly once, whatever is killed."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_trainer import state_bytes

from click_logs import click_log
from redis_server import RedisServer
from rowhaul.checkpoint import latest_checkpoint
from rowhaul.checkpoint.opening import open_checkpoint
from rowhaul.data.schema import Schema
from rowhaul.data.sources.redis_stream import PASSWORD_VARIABLE, RedisSource
from rowhaul.errors import ConfigError, DataError
from rowhaul.train import TrainConfig, load_trained, train_run
from rowhaul.train.config import ModelConfig
from rowhaul.train.run_data import remembered_data
from rowhaul.train.stream_config import StreamConfig

pytestmark = pytest.mark.slow
FILES = TrainConfig(model=ModelConfig(embedding_dim=4), batch_size=256, checkpoint_every=3)
CONFIG = replace(FILES, stream=StreamConfig(stop_when_idle="0.5s"))
SAMPLES, KILLS = 6000, 5


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(folder)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def expected(tmp_path_factory, log_schema):
    """The samples, and the bits of a run over them in a file."""
    folder, table = tmp_path_factory.mktemp("log"), click_log(SAMPLES, 3)
    pq.write_table(table, folder / "part-0.parquet")
    train_run(FILES, log_schema, folder, out=folder / "run")
    return table.to_pylist(), state_bytes(load_trained(folder / "run"))


def send(client, stream, rows, at_once=1):
    """Add entries with explicit ids, so that an entry that was added already is not added again."""
    import redis

    for number in range(0, len(rows), at_once):
        lines = "\n".join(json.dumps(row) for row in rows[number : number + at_once])
        while True:
            try:
                client.xadd(stream, {"json": lines}, id=f"{number + 1}-1")
                break
            except redis.exceptions.ConnectionError:
                time.sleep(0.05)  # it is down, or has answered nothing
            except redis.exceptions.ResponseError as error:
                if "equal or smaller" in str(error):  # it was added, but the answer was lost
                    break
                raise


def test_entries_of_arrow_are_learned_as_a_file(server, expected, tmp_path, log_schema):
    """Also beside entries of JSON, and where the run ends within an entry."""
    rows, bits = expected
    table = pa.Table.from_pylist(rows)
    for number, first in enumerate(range(0, SAMPLES, 70)):
        some = table.slice(first, 70)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, some.schema) as stream:
            stream.write_table(some)
        lines = "\n".join(json.dumps(row) for row in some.to_pylist())
        as_json = number in (5, 60)
        server.client.xadd("clicks", {"json": lines} if as_json else {"arrow": sink.getvalue().to_pybytes()})
        if first == 2100:
            server.client.xadd("clicks", {"arrow": b"no such thing"})
    stopped = replace(CONFIG, max_steps=10)
    train_run(stopped, log_schema, server.url("clicks"), out=tmp_path / "run")
    result = train_run(CONFIG, log_schema, server.url("clicks"), out=tmp_path / "run", resume=True)
    assert result.samples == SAMPLES
    assert state_bytes(load_trained(tmp_path / "run")) == bits
    (aside,) = map(json.loads, (tmp_path / "run" / "set_aside.jsonl").read_text().splitlines())
    assert "its field arrow is no Arrow stream" in aside["why"]


@pytest.mark.parametrize("at_once", [1, 7])
def test_a_stream_is_learned_as_a_file(at_once, server, expected, tmp_path, log_schema):
    rows, bits = expected
    send(server.client, "clicks", rows, at_once)
    result = train_run(CONFIG, log_schema, server.url("clicks"), out=tmp_path / "run")
    assert result.samples == SAMPLES
    assert state_bytes(load_trained(tmp_path / "run")) == bits
    (group,) = server.client.xinfo_groups("clicks")
    assert (group["name"], group["pending"], group["lag"]) == (b"rowhaul", 0, 0)


def test_fields_as_columns_poisoned_entries_and_a_stop_in_between(server, expected, tmp_path, log_schema):
    rows, bits = expected
    schema = Schema.from_dict(
        {"label": "click", "dense": ["price"], "ids": ["user", "item", {"name": "tags", "separator": " "}]}
    )
    pipe = server.client.pipeline()
    for number, row in enumerate(rows):
        pipe.xadd("clicks", {**row, "price": repr(row["price"]), "tags": " ".join(map(str, row["tags"]))})
        if number % 1000 == 10:
            pipe.xadd("clicks", {**row, "tags": "1", "price": "cheap"})
            pipe.xadd("clicks", {"json": '{"click": 1}'})
    pipe.execute()
    calls = iter(range(1, 10**6))
    train_run(
        CONFIG, schema, server.url("0/clicks"), out=tmp_path / "run", should_stop=lambda: next(calls) > 8
    )
    (group,) = server.client.xinfo_groups("clicks")
    assert group["pending"] > 0  # delivered ahead of training
    train_run(CONFIG, schema, server.url("0/clicks"), out=tmp_path / "run", resume=True)
    assert state_bytes(load_trained(tmp_path / "run")) == bits
    assert open_checkpoint(tmp_path / "run").facts["stream_position"]["set_aside"] == 12
    reasons = (tmp_path / "run" / "set_aside.jsonl").read_text()
    assert "dense field 'price' is 'cheap'" in reasons
    assert "no field 'price', 'user', 'item', 'tags'" in reasons


def test_a_server_that_goes_away_and_comes_back(server, expected, tmp_path, log_schema):
    rows, bits = expected
    send(server.client, "clicks", rows[:3000])

    def disturb():
        time.sleep(1.0)
        server.kill()
        time.sleep(1.5)
        server.start()
        send(server.client, "clicks", rows)

    thread = threading.Thread(target=disturb)
    thread.start()
    config = replace(CONFIG, stream=StreamConfig(stop_when_idle="6s"))
    train_run(config, log_schema, server.url("clicks"), out=tmp_path / "run")
    thread.join()
    assert state_bytes(load_trained(tmp_path / "run")) == bits
    notes = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "is away" in notes
    assert "is back" in notes


@pytest.mark.parametrize(
    ("oldest", "said", "following"),
    [
        ("6-1", None, 50),  # behind what was learned: nothing is missing
        ("5-1", None, 50),
        ("9-1", "entries before 9-1 were removed from the stream, but the model has learned up to 5-1", 80),
        ("30-1", "all entries were removed", None),
    ],
)
def test_entries_that_were_trimmed_before_they_were_learned_are_told(oldest, said, following, server):
    source, position = stopped_source(server, 10)
    server.client.xtrim("clicks", minid=oldest, approximate=False)
    chunk = next(source.read(position))
    source.close()
    assert (None if chunk is None else chunk.block.ids[0].values[0]) == following
    assert [note for note in source.notes if said is None or said not in note] == []
    assert len(source.notes) == (said is not None)


def test_what_is_left_of_an_entry_is_not_left_out_of_another(server):
    source, position = stopped_source(server, 11)
    server.client.xtrim("clicks", minid="9-1", approximate=False)
    assert next(source.read(position)).block.ids[0].values[:3].tolist() == [80, 81, 90]
    source.close()
    assert any("entry 6-1 was removed from the stream when 1 of its samples" in one for one in source.notes)


def stopped_source(server, num_samples):
    """A source of twenty entries of two samples, and the position where another one was stopped."""
    schema = Schema.from_dict({"label": "click", "ids": ["user"]})
    for number in range(20):
        lines = (json.dumps({"click": 1, "user": 10 * number + line}) for line in range(2))
        server.client.xadd("clicks", {"json": "\n".join(lines)}, id=f"{number + 1}-1")
    source = RedisSource(server.url("clicks"), schema, {})
    position = next(source.read(None)).after(num_samples)
    source.saved(position)
    source.close()
    return RedisSource(server.url("clicks"), schema, {}), position


def test_a_stream_without_the_fields_of_the_schema_is_an_error(server, tmp_path, log_schema):
    for _ in range(200):
        server.client.xadd("clicks", {"user": "1", "clicked": "1"})
    with pytest.raises(DataError, match="does not fit the schema: of its first 100 messages"):
        train_run(CONFIG, log_schema, server.url("clicks"), out=tmp_path / "run")
    server.client.set("text", "no stream")
    with pytest.raises(DataError, match="WRONGTYPE"):
        train_run(CONFIG, log_schema, server.url("text"), out=tmp_path / "other")
    with pytest.raises(ConfigError, match="expected redis://host"):
        train_run(CONFIG, log_schema, "redis://localhost", out=tmp_path / "third")


def test_a_password_is_not_kept(server, expected, tmp_path, log_schema, monkeypatch):
    rows, bits = expected
    run, config = tmp_path / "run", replace(CONFIG, max_steps=10)
    send(server.client, "clicks", rows, 7)
    server.client.config_set("requirepass", "s3cret/")
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    with_password = server.url("clicks").replace("//", "//:s3cret%2F@")
    train_run(config, log_schema, with_password, out=run)
    assert [one for one in run.rglob("*") if one.is_file() and b"s3cret" in one.read_bytes()] == []
    (address,) = remembered_data(run).data
    assert address == server.url("clicks")
    for given in (address, with_password.replace("s3", "S3")):
        with pytest.raises(ConfigError, match=r"does not let this user and password in.*REDISCLI_AUTH"):
            train_run(CONFIG, log_schema, given, out=run, resume=True)
    monkeypatch.setenv(PASSWORD_VARIABLE, "s3cret/")
    train_run(CONFIG, log_schema, address, out=run, resume=True)
    assert state_bytes(load_trained(run)) == bits


def newest_step(run):
    newest = latest_checkpoint(run / "checkpoints") if (run / "checkpoints").exists() else None
    return int(newest.name.removeprefix("step-")) if newest is not None else 0


def test_random_kills_of_trainer_and_server_end_in_the_same_bits(server, expected, tmp_path, log_schema):
    """Samples come in while both are killed; what was not saved is learned again, and nothing twice."""
    rows, bits = expected
    log_schema.write(tmp_path / "schema.yaml")
    chance, run = random.Random(int(os.environ.get("KILL_SEED", "1"))), tmp_path / "run"
    common = [sys.executable, "-m", "rowhaul", "train", "--data", server.url("clicks"), "--schema"]
    common += [str(tmp_path / "schema.yaml"), "--out", str(run), "--batch-size", "256"]
    common += ["--embedding-dim", "4", "--checkpoint-every", "2", "--threads", "1"]
    for number in range(KILLS):
        last = SAMPLES * (number + 1) // (KILLS + 1) // 7 * 7  # whole entries
        producer = threading.Thread(target=send, args=(server.client, "clicks", rows[:last], 7))
        producer.start()
        before, resume = newest_step(run), ["--resume"] if (run / "config.yaml").exists() else []
        trainer = subprocess.Popen([*common, *resume], stdout=subprocess.DEVNULL)
        if number % 2:
            time.sleep(chance.uniform(0, 8))
            server.kill()
            time.sleep(chance.uniform(0.1, 2))
            server.start()
        end = time.monotonic() + 200
        while newest_step(run) == before:
            assert trainer.poll() is None
            assert time.monotonic() < end, "nothing is saved"
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.3))
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        producer.join()
    send(server.client, "clicks", rows, 7)
    config = replace(CONFIG, checkpoint_every=2, threads=1)
    train_run(config, log_schema, server.url("clicks"), out=run, resume=True)
    assert open_checkpoint(run).facts["samples"] == SAMPLES
    assert state_bytes(load_trained(run)) == bits
