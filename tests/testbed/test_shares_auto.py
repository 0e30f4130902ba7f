"""`shares: auto` on shaped links: workers that help are used, and left out once their link is throttled."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from click_logs import click_log
from rowhaul.data.schema import Schema
from rowhaul.simulate.links import Link
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import ModelConfig, TrainConfig
from testbed import ShapedNetwork, run_in
from testbed.network import reshape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BATCH, STEPS, SLOW = 96, 240, 2
# A sample takes a millisecond that needs no processor: three machines are three times as fast as one even
# where all of them share two cores.
SCRIPT = """
import json, sys, time
from pathlib import Path
from rowhaul.data.schema import Schema
from rowhaul.nn.models.dlrm import DLRM
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import run

forward = DLRM.forward

def slowly(self, batch):
    time.sleep(1e-3 * len(batch))
    return forward(self, batch)

DLRM.forward = slowly
data, out, config = sys.argv[1:]
run.train_on_cluster(
    TrainConfig.from_dict(json.loads(config)), Schema.read(Path(data) / "schema.yaml"), data, out=out)
"""


def notes_in(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    complete = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line["text"] for line in complete if line["kind"] == "note"]


def test_a_throttled_link_is_noticed_and_its_worker_left_out(tmp_path: Path, log_schema: Schema) -> None:
    log = tmp_path / "log"
    log.mkdir()
    pq.write_table(click_log(STEPS * BATCH, 0), log / "part-0.parquet")
    log_schema.write(log / "schema.yaml")
    (tmp_path / "train_it.py").write_text(SCRIPT)
    config = TrainConfig(
        model=ModelConfig("dlrm", embedding_dim=4, options={"bottom": [8], "top": [64, 64]}),
        batch_size=BATCH,
        cluster=ClusterConfig(workers=3, stores=0, colocated=True, shares="auto", dispatcher="round-robin"),
    )
    out = tmp_path / "run"
    arguments = [str(tmp_path / "train_it.py"), str(log), str(out), json.dumps(config.to_dict())]
    throttled: list[int] = []

    def throttle_once_decided() -> None:
        if not throttled and any(text.startswith("shares [") for text in notes_in(out)):
            throttled.append(len(notes_in(out)))
            reshape(network, SLOW, Link(5e4))

    with ShapedNetwork([Link(5e6)] * 3) as network:
        run_in(
            network,
            lambda rank: [sys.executable, *arguments],
            500,
            folder=tmp_path,
            environment={"ROWHAUL_SIDE_INTERFACE": "haul0", "OMP_NUM_THREADS": "1"},
            meanwhile=throttle_once_decided,
        )
    notes = notes_in(out)
    first, *others = [text for text in notes if text.startswith("shares [")]
    assert shares_in(first)[SLOW] > 0, notes
    assert any(text.startswith("shares are looked at again: iterations take longer") for text in notes), notes
    assert others, notes
    assert shares_in(others[0])[SLOW] == 0, notes
    assert any(text.startswith("left out from iteration") for text in notes), notes


def shares_in(note: str) -> list[int]:
    return json.loads(note.removeprefix("shares ").partition("]")[0] + "]")
