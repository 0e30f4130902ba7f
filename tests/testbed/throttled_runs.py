"""Real runs on shaped links that change while they train."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from click_logs import click_log
from rowhaul.data.schema import Schema
from rowhaul.simulate.links import Link
from rowhaul.train.config import TrainConfig
from testbed import ShapedNetwork, run_in
from testbed.layout import Network

_SCRIPT = """
import json, sys
from pathlib import Path
from rowhaul.data.schema import Schema
from rowhaul.train.config import TrainConfig
from rowhaul.train.distributed import run

data, out, config = sys.argv[1:]
run.train_on_cluster(
    TrainConfig.from_dict(json.loads(config)), Schema.read(Path(data) / "schema.yaml"), data, out=out)
"""


def train_on(
    links: list[Link],
    config: TrainConfig,
    steps: int,
    folder: Path,
    schema: Schema,
    meanwhile: Callable[[Network, Path], None],
    before: str = "",
) -> Path:
    """Train one worker a link; ``before`` is Python that every rank runs first. Returns the run's folder."""
    log, out, script = folder / "log", folder / "run", folder / "train_it.py"
    log.mkdir()
    pq.write_table(click_log(steps * config.batch_size, 0), log / "part-0.parquet")
    schema.write(log / "schema.yaml")
    script.write_text(before + _SCRIPT)
    command = [sys.executable, str(script), str(log), str(out), json.dumps(config.to_dict())]
    with ShapedNetwork(links) as network:
        run_in(
            network,
            lambda rank: command,
            500,
            folder=folder,
            environment={"ROWHAUL_SIDE_INTERFACE": "haul0", "OMP_NUM_THREADS": "1"},
            meanwhile=lambda: meanwhile(network, out),
        )
    return out


def lines_in(folder: Path) -> list[dict[str, Any]]:
    """What a run has logged so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def notes_in(folder: Path) -> list[str]:
    """The notes among them."""
    return [line["text"] for line in lines_in(folder) if line["kind"] == "note"]
