"""Ways to sum that are chosen again while a run trains, and from the speeds that the settings give."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointed_ranks import CONFIG, STEPS, Session, contents, on_threads, same_bits
from rowhaul.cluster.launcher import launch
from rowhaul.data.stream import SampleStream
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed.setup import distribute
from rowhaul.train.log import METRICS_FILE
from rowhaul.train.trainer import Trainer
from rowhaul.transport.in_process import InProcessCollective


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, log_schema: Any) -> Session:
    return Session.on_log(tmp_path_factory.mktemp("small-log"), log_schema)


@pytest.mark.parametrize("side", ["lo", "eth1"])
def test_given_speeds_are_those_of_the_dense_sum_if_it_uses_these_links(
    side: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[float]] = []
    monkeypatch.setattr(InProcessCollective, "choose_again", lambda group, speeds: given.append(speeds))
    config = ClusterConfig(workers=2, cache="190", links="80mbit,8mbit")

    def run(cluster: Any) -> None:
        cluster.interface, cluster.side_interface = "lo", side
        stream = SampleStream(session.data, session.schema, CONFIG.batch_size)
        distribute(cluster, Trainer(CONFIG, session.schema).model, stream, config).close()

    on_threads(config.topology(), run)
    assert given == ([[1e7, 1e6]] * 2 if side == "lo" else [])


SCRIPT = """
import itertools, json, sys
from pathlib import Path
from rowhaul.data.schema import Schema
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import run
from rowhaul.tuning.sum_watch import SumWatch

class Session(run.ClusterSession):
    def start(self):
        asked = itertools.count(1)
        self.sums = SumWatch(self.training, self.log.tell)
        self.sums._is_slow = True  # as far as the log is concerned
        self.sums.wants_review = lambda: next(asked) % 3 == 0
        super().start()

data, out, config, again = sys.argv[1:]
if again:
    run.ClusterSession = Session
schema = Schema.read(Path(data) / "schema.yaml")
run.train_on_cluster(TrainConfig.from_dict(json.loads(config)), schema, data, out=Path(out))
"""


@pytest.mark.slow
def test_real_processes_choose_again_in_the_same_iterations(session: Session, tmp_path: Path) -> None:
    """Four workers, one of which has no share; a choice after every few iterations."""
    session.schema.write(session.data / "schema.yaml")
    (tmp_path / "train_it.py").write_text(SCRIPT)
    cluster = ClusterConfig(workers=4, stores=0, colocated=True, cache="190", shares="2,1,0,1", hot_rows=5)
    text = json.dumps(replace(CONFIG, cluster=cluster, log_every=1).to_dict())
    for folder, again in (("once", ""), ("again", "yes")):
        arguments = [str(tmp_path / "train_it.py"), str(session.data), str(tmp_path / folder), text, again]
        launch(arguments, 4, 0, True, command=[sys.executable], environment={"OMP_NUM_THREADS": "1"})
    assert same_bits(contents(tmp_path / "once"), contents(tmp_path / "again"))
    lines = [json.loads(line) for line in (tmp_path / "again" / METRICS_FILE).read_text().splitlines()]
    notes = [line["text"] for line in lines if line["kind"] == "note"]
    assert any(text.startswith("dense sums take longer than before") for text in notes), notes
    assert lines[-1].get("step", STEPS) == STEPS
