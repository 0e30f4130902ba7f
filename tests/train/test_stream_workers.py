"""Streams on several workers: rank 0 reads and shares; equal to files, also after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from click_logs import click_log
from rowhaul.checkpoint.opening import open_checkpoint
from rowhaul.data.keys import hash_strings
from rowhaul.data.schema import TimeColumn
from rowhaul.errors import ConfigError
from rowhaul.train import TrainConfig, load_trained
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.run_stream import check_streamable

SETTINGS = ["--batch-size", "64", "--embedding-dim", "4", "--set", "checkpoint_every=3"]
SETTINGS += ["--set", "precision=float64", "--set", "keep_checkpoints=99", "--ttl", "100s"]
SIZES = (500, 300, 433)


def start(*arguments):
    command = [sys.executable, "-m", "rowhaul", "train", *map(str, arguments), *SETTINGS]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process, code=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def put(folder, number):
    """Write a file elsewhere and rename it into a folder."""
    folder.mkdir(exist_ok=True)
    table = click_log(SIZES[number], number)
    at = pa.array(np.arange(len(table)) // 2 + 1000 * number + 1_700_000_000)
    pq.write_table(table.append_column("at", at), folder / f".{number}.tmp")
    os.rename(folder / f".{number}.tmp", folder / f"part-{number}.parquet")


def wait_for_step(run, step, process):
    """Wait until a run has saved a step, or a later one."""
    end = time.monotonic() + 200
    saved = "checkpoints/step-?????????/manifest.json"  # others are unfinished
    while not any(int(one.parent.name[5:]) >= step for one in run.glob(saved)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"step {step} is not saved"
        time.sleep(0.1)


def learned(run):
    """All records and dense weights of a run's last checkpoint."""
    trainer = load_trained(run)
    found = {name: one.detach().numpy() for name, one in trainer.model.named_parameters()}
    for config in trainer.collection.embedding_bag_configs():
        for keys, records in trainer.collection.rows(config.name):
            found |= {(config.name, int(key)): record for key, record in zip(keys, records, strict=True)}
    return found


def held(run):
    """The rows that a run has kept."""
    return {name for name in learned(run) if isinstance(name, tuple)}


def recent(logs):
    """The rows that the batches of the last 100 seconds of events have named."""
    table = pa.concat_tables([pq.read_table(logs / f"part-{number}.parquet") for number in range(3)])
    at, last = table["at"].to_numpy(), {}
    for first in range(0, len(table), 64):
        newest, some = at[: first + 64].max(), table.slice(first, 64)
        for name in ("user", "item", "tags"):
            values = some[name].combine_chunks()
            values = values.flatten() if name == "tags" else values
            keys = hash_strings(values) if name == "item" else values.to_numpy()
            last |= {(name, int(key)): newest for key in keys}
    return {row for row, time in last.items() if at.max() - time < 100}


def difference(one, other):
    one, other = learned(one), learned(other)
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.slow
def test_a_stream_on_two_workers_is_learned_as_files_also_after_a_kill(tmp_path, log_schema):
    logs, incoming = tmp_path / "logs", tmp_path / "incoming"
    for number in range(3):
        put(logs, number)
    for folder in (logs, incoming):
        folder.mkdir(exist_ok=True)
        replace(log_schema, time=TimeColumn("at")).write(folder / "schema.yaml")
    files = start("--data", logs, "--workers", 2, "--data-from", "rank0", "--out", tmp_path / "files")
    finish(files)
    alone = start("--data", logs, "--follow", "--stop-when-idle", "0.5s", "--out", tmp_path / "alone")
    finish(alone)
    put(incoming, 0)
    follow = ("--data", incoming, "--follow", "--workers", 2, "--out", tmp_path / "run")
    process = start(*follow)
    wait_for_step(tmp_path / "run", 3, process)
    process.kill()  # its ranks end with it
    process.communicate(timeout=200)
    put(incoming, 1)
    process = start(*follow, "--resume")
    wait_for_step(tmp_path / "run", 6, process)
    put(incoming, 2)
    wait_for_step(tmp_path / "run", 15, process)
    time.sleep(1)  # all full batches are trained but those that plans look ahead to: it waits for samples
    process.send_signal(signal.SIGTERM)
    assert "Traceback" not in finish(process, -signal.SIGTERM)
    assert open_checkpoint(tmp_path / "run").facts["samples"] % 64 == 0  # nothing of a batch that is not full
    final = start(*follow, "--resume", "--stop-when-idle", "0.5s")
    finish(final)
    assert open_checkpoint(tmp_path / "run").facts["samples"] == sum(SIZES)
    assert difference(tmp_path / "run", tmp_path / "files") == 0
    assert difference(tmp_path / "run", tmp_path / "alone") < 1e-9
    assert held(tmp_path / "run") == recent(logs)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(line["kind"] == "progressive" for line in lines)


def test_what_needs_the_data_beforehand_is_refused():
    for settings, name in (({"hot_rows": 10}, "hot_rows"), ({"shares": "auto"}, "shares")):
        config = TrainConfig(cluster=ClusterConfig(workers=2, **settings))
        with pytest.raises(ConfigError, match=f"cluster.{name} does not go together with a stream"):
            check_streamable(config)
    with pytest.raises(ConfigError, match="eval_every does not go together"):
        check_streamable(TrainConfig(cluster=ClusterConfig(workers=2), eval_every=10))
    check_streamable(TrainConfig(cluster=ClusterConfig(workers=2)))
