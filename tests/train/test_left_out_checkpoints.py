"""Workers that are left out: checkpoints, resuming, and real processes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from checkpointed_ranks import CLUSTER, CONFIG, STEPS, Session, contents, largest_difference, same_bits
from rowhaul.cluster.launcher import launch
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.log import METRICS_FILE

pytestmark = pytest.mark.slow

HOT = [0, 7919, 2 * 7919]
OUT = {0: ("shares", (2, 0, 1)), 4: ("shares", (1, 1, 0)), 7: ("shares", (1, 0, 0))}
PAUSES = (1, 4, 5, 7)


@pytest.fixture(scope="module")
def session(tmp_path_factory, log_schema):
    plain = Session.on_log(tmp_path_factory.mktemp("small-log"), log_schema)
    return replace(plain, hot=HOT, posted=OUT, pauses=PAUSES, may_leave=True)


@pytest.mark.parametrize("colocated", [False, True])
def test_a_checkpoint_that_is_saved_while_some_are_out_goes_on_with_the_same_bits(
    colocated, session, tmp_path
):
    cluster = replace(CLUSTER, colocated=colocated, stores=0 if colocated else 1)
    session = replace(session, cluster=cluster)
    replace(session, may_leave=False).on_threads(tmp_path / "stays")
    for name, at in (("b", 5), ("c", 8)):  # worker 1 is out at 5, worker 2 at 8, both from 9 on
        session.interrupted(tmp_path / name, at=at)
        assert same_bits(contents(tmp_path / "stays"), contents(tmp_path / name))


def test_saving_beside_training_while_some_are_out_changes_nothing(session, tmp_path):
    trainers = session.on_threads(tmp_path / "a")
    replace(session, beside=range(1, STEPS)).on_threads(tmp_path / "b")
    assert same_bits(contents(tmp_path / "a"), contents(tmp_path / "b"))
    weights = [[one.tolist() for one in trainer.model.parameters()] for trainer in trainers[:3]]
    assert weights[1] == weights[0]  # after the last save all are up to date
    assert weights[2] == weights[0]


def test_another_cluster_goes_on_with_the_same_model(session, tmp_path):
    session.on_threads(tmp_path / "a")
    session.interrupted(tmp_path / "b", at=5, cluster=replace(CLUSTER, workers=2), posted={})
    assert largest_difference(contents(tmp_path / "a"), contents(tmp_path / "b")) < 1e-9


def test_shares_that_a_cache_has_no_room_for_are_given_up_and_the_run_goes_on(session, tmp_path):
    """One worker could train a few batches alone, but not iteration 4, of 95 rows, nor 11."""
    posted = {0: ("shares", (1, 0, 0)), 5: ("shares", (1, 0, 0))}
    tight = replace(session, hot=[], cluster=replace(CLUSTER, cache="94"), pauses=(1, 5), posted={})
    tight.on_threads(tmp_path / "equal")
    chosen = replace(tight, posted=posted)
    chosen.on_threads(tmp_path / "a")
    for at in (4, 8):  # before it is given up, and after that
        chosen.interrupted(tmp_path / f"b{at}", at=at)
        assert same_bits(contents(tmp_path / "a"), contents(tmp_path / f"b{at}"))
    assert not same_bits(contents(tmp_path / "a"), contents(tmp_path / "equal")), "records do nothing here"
    assert largest_difference(contents(tmp_path / "a"), contents(tmp_path / "equal")) < 1e-9


SCRIPT = """
import json, sys
from pathlib import Path
from rowhaul.data.schema import Schema
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import run, training

data, out, config, stays = sys.argv[1:]
if stays:
    training.ReplicaState = lambda *given: None
schema, out = Schema.read(Path(data) / "schema.yaml"), Path(out)
run.train_on_cluster(
    TrainConfig.from_dict(json.loads(config)), schema, data, out=out, eval_data=data, resume=out.exists())
"""


@pytest.mark.slow
def test_real_processes(session, tmp_path):
    """Worker 1 never trains; evaluated and saved on the way, and resumed."""
    session.schema.write(session.data / "schema.yaml")
    (tmp_path / "train_it.py").write_text(SCRIPT)
    config = replace(
        CONFIG,
        rates=type(CONFIG.rates)(),  # whose decay would depend on the number of steps
        cluster=ClusterConfig(workers=3, stores=0, colocated=True, cache="190", shares="2,0,1", hot_rows=5),
        eval_every=4,
        checkpoint_every=3,
        log_every=1,
    )

    def train(folder: str, steps: int, stays: str = "") -> None:
        text = json.dumps(replace(config, max_steps=steps).to_dict())
        arguments = [str(tmp_path / "train_it.py"), str(session.data), str(tmp_path / folder), text, stays]
        launch(arguments, 3, 0, True, command=[sys.executable], environment={"OMP_NUM_THREADS": "1"})

    train("stays", STEPS, "yes")
    train("leaves", 7)
    train("leaves", STEPS)
    assert same_bits(contents(tmp_path / "stays"), contents(tmp_path / "leaves"))
    lines = [json.loads(line) for line in (tmp_path / "leaves" / METRICS_FILE).read_text().splitlines()]
    notes = [line["text"] for line in lines if line["kind"] == "note"]
    assert any(
        text.startswith("left out from iteration 0 on: worker 1. Without a share")
        and "it stays the home of its rows" in text
        for text in notes
    ), notes
    assert any(line.get("bytes/catch_up", 0) > 0 for line in lines)
