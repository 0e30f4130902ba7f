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
SCRIPT = """
import json, sys
from pathlib import Path
from rowhaul.data.schema import Schema
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import run

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
    (tmp_path / "train_it.py").write_text(before + SCRIPT)
    config = replace(CONFIG, batch_size=BATCH, max_steps=STEPS, cluster=CLUSTER)
    arguments = [
        str(tmp_path / "train_it.py"),
        str(data),
        str(tmp_path / "run"),
        json.dumps(config.to_dict()),
    ]
    launch(arguments, 2, 0, True, command=[sys.executable], environment={"OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines()]
    notes = [line["text"] for line in lines if line["kind"] == "note"]
    for part in says:
        assert any(part in text for text in notes), notes
    assert any(line["kind"] == "eval" and line["step"] == STEPS for line in lines)
    learned = contents(tmp_path / "run", STEPS)
    assert learned.keys() == single.keys()
    for name, values in single.items():
        np.testing.assert_allclose(learned[name], values, rtol=1e-9, atol=1e-12, err_msg=name)


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
