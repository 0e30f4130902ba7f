"""`shares: auto` that finds one machine to be the quickest: rank 0 goes on alone, and the others wait."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest

from checkpointed_ranks import CONFIG, contents
from click_logs import click_log
from rowhaul._activity import page
from rowhaul._cores import usable_cores
from rowhaul.cluster.launcher import launch
from rowhaul.data.schema import SCHEMA_FILE, Schema
from rowhaul.data.stream import SampleStream
from rowhaul.train import train_run
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed import one_machine
from rowhaul.train.log import METRICS_FILE
from rowhaul.train.trainer import Trainer

pytestmark = pytest.mark.slow

STEPS, BATCH = 120, 64
CLUSTER = ClusterConfig(workers=2, stores=0, colocated=True, shares="auto", cache="4096")
# Rank 0 measures links after every step it takes alone; once they have another speed than before.
LINKS_CHANGE = """
import dataclasses, itertools
from rowhaul.train.distributed import one_machine
from rowhaul.tuning.shares import MeasuredLinks

measure, calls = MeasuredLinks.measure, itertools.count()

def measured(cluster):
    links, faster = measure(cluster), 1000.0 if next(calls) == 3 else 1.0
    return dataclasses.replace(links, bytes_per_second=tuple(faster for _ in links.bytes_per_second))

MeasuredLinks.measure = measured
one_machine._LOOK_SECONDS = 0.0
one_machine.seconds_between_checks = lambda seconds: 0.0
"""
NO_ROOM = """
from rowhaul.train.distributed import one_machine

one_machine.ROOM = 1e12
"""
# Rank 0 notes with how many threads it trains how many samples of a batch.
NOTE_THREADS = """
import os, sys
import torch
from rowhaul.train.trainer import Trainer

learn, notes = Trainer.learn, open(f"{sys.argv[2]}-threads-{os.environ['RANK']}", "a", buffering=1)

def noted(self, parts, num_samples, step_rows):
    print(sum(map(len, parts)), num_samples, torch.get_num_threads(), file=notes)
    return learn(self, parts, num_samples, step_rows)

Trainer.learn = noted
"""
# Sums of several workers take so long that one machine is the quickest, however busy this one is.
SCRIPT = """
import json, sys, time
from pathlib import Path
from rowhaul.data.schema import Schema
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import run
from rowhaul.transport.dense.overlapping import OverlappingSum

wait = OverlappingSum.wait

def slowly(self):
    time.sleep(0.5)
    return wait(self)

OverlappingSum.wait = slowly
data, out, config = sys.argv[1:]
schema = Schema.read(Path(data) / "schema.yaml")
config = TrainConfig.from_dict(json.loads(config))
done = run.train_on_cluster(config, schema, data, out=Path(out), eval_data=data)
assert done.step == done.steps_taken and not done.interrupted, done
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, log_schema: Schema) -> Path:
    folder = tmp_path_factory.mktemp("log")
    pq.write_table(click_log(STEPS * BATCH, 0), folder / "part-0.parquet", row_group_size=700)
    log_schema.write(folder / SCHEMA_FILE)
    return folder


@pytest.fixture(scope="module")
def single(data: Path, log_schema: Schema, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The model that one process learns."""
    out = tmp_path_factory.mktemp("single") / "run"
    config = replace(CONFIG, batch_size=BATCH, max_steps=STEPS)
    train_run(config, log_schema, data, out=out)
    return contents(out, STEPS)


def train_on_two(before: str, data: Path, folder: Path, **settings: Any) -> None:
    """Train with a thread a worker; ``before`` is Python that each runs first."""
    (folder / "train_it.py").write_text(before + SCRIPT)
    config = replace(CONFIG, batch_size=BATCH, max_steps=STEPS, cluster=CLUSTER, **settings)
    arguments = [str(folder / "train_it.py"), str(data), str(folder / "run"), json.dumps(config.to_dict())]
    launch(arguments, 2, 0, True, command=[sys.executable], environment={"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("", ["goes on alone"]),
        (
            LINKS_CHANGE,
            ["goes on alone", "all ranks train again: the speed of a link has changed 1000.00 times"],
        ),
        (NO_ROOM, ["one machine is the quickest, but stays in the cluster"]),
    ],
    ids=["to the end", "until links change", "no room"],
)
def test_rank_0_goes_on_alone_and_learns_the_same_model(
    before: str, says: list[str], data: Path, single: dict[str, Any], tmp_path: Path
) -> None:
    train_on_two(before, data, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines()]
    notes = [line["text"] for line in lines if line["kind"] == "note"]
    for part in says:
        assert any(part in text for text in notes), notes
    assert any(line["kind"] == "eval" and line["step"] == STEPS for line in lines)
    learned = contents(tmp_path / "run", STEPS)
    assert learned.keys() == single.keys()
    for name, values in single.items():
        np.testing.assert_allclose(learned[name], values, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("room", ["", NO_ROOM], ids=["alone", "in the cluster"])
def test_one_machine_is_tried_and_goes_on_with_the_threads_of_all_ranks(
    room: str, data: Path, tmp_path: Path
) -> None:
    """Each rank of the host has one, and the settings say so, too."""
    train_on_two(NOTE_THREADS + room, data, tmp_path, threads=1)
    lines = (tmp_path / "run-threads-0").read_text().splitlines()
    threads: dict[bool, set[int]] = {True: set(), False: set()}  # by whether rank 0 trained all samples
    for mine, every, count in (map(int, line.split()) for line in lines):
        threads[mine == every].add(count)
    assert threads == {True: {min(2, usable_cores())}, False: {1}}
    assert len(lines) == STEPS


def test_steps_and_evaluations_alone_are_progress_so_that_nobody_thinks_rank_0_stuck(
    data: Path, log_schema: Schema
) -> None:
    ticks = page.read().ticks
    lookout = one_machine._Lookout(cast(Any, None), cast(Any, None), lambda: False)
    assert not lookout.should_stop()
    assert page.read().ticks == ticks + 1
    stream = SampleStream(data, log_schema, batch_size=STEPS * BATCH // 3)
    Trainer(CONFIG, log_schema).evaluate(stream)
    assert page.read().ticks == ticks + 4
