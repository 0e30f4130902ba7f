"""Dense sums on shaped links: once a link is throttled, all workers choose again how to sum."""

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

BATCH, STEPS, THROTTLED_AT, SLOW = 48, 160, 50, 2
SCRIPT = """
import json, sys
from pathlib import Path
from rowhaul.data.schema import Schema
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import run

data, out, config = sys.argv[1:]
run.train_on_cluster(
    TrainConfig.from_dict(json.loads(config)), Schema.read(Path(data) / "schema.yaml"), data, out=out)
"""


def lines_in(folder: Path) -> list[dict[str, object]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def is_chosen_again(folder: Path) -> bool:
    notes = [str(line["text"]) for line in lines_in(folder) if line["kind"] == "note"]
    return any(text.startswith("dense sums take longer than before") for text in notes)


def test_a_throttled_link_leads_to_another_choice(tmp_path: Path, log_schema: Schema) -> None:
    log, out = tmp_path / "log", tmp_path / "run"
    log.mkdir()
    pq.write_table(click_log(STEPS * BATCH, 0), log / "part-0.parquet")
    log_schema.write(log / "schema.yaml")
    (tmp_path / "train_it.py").write_text(SCRIPT)
    config = TrainConfig(
        model=ModelConfig("dlrm", embedding_dim=4, options={"bottom": [8], "top": [64, 64]}),
        batch_size=BATCH,
        log_every=5,
        cluster=ClusterConfig(workers=3, stores=0, colocated=True, dispatcher="round-robin"),
    )
    arguments = [str(tmp_path / "train_it.py"), str(log), str(out), json.dumps(config.to_dict())]
    speeds = [Link(2e5), Link(1e7)]  # what the link becomes: slow, then fast again

    def throttle() -> None:
        steps = [line["step"] for line in lines_in(out) if line["kind"] == "train"]
        due = (bool(steps) and steps[-1] >= THROTTLED_AT) if len(speeds) == 2 else is_chosen_again(out)
        if speeds and due:
            reshape(network, SLOW, speeds.pop(0))

    with ShapedNetwork([Link(1e7)] * 3) as network:
        run_in(
            network,
            lambda rank: [sys.executable, *arguments],
            500,
            folder=tmp_path,
            environment={"ROWHAUL_SIDE_INTERFACE": "haul0", "OMP_NUM_THREADS": "1"},
            meanwhile=throttle,
        )
    assert is_chosen_again(out), lines_in(out)
    assert [line["step"] for line in lines_in(out) if line["kind"] == "train"][-1] == STEPS
