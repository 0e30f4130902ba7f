"""Dense sums on shaped links: once a link is throttled, all workers choose again how to sum."""

from __future__ import annotations

from pathlib import Path

import pytest
from throttled_runs import lines_in, notes_in, train_on

from rowhaul.data.schema import Schema
from rowhaul.simulate.links import Link
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import ModelConfig, TrainConfig
from testbed.layout import Network
from testbed.network import reshape

pytestmark = pytest.mark.slow

BATCH, STEPS, THROTTLED_AT, SLOW = 48, 160, 50, 2


def is_chosen_again(folder: Path) -> bool:
    return any(text.startswith("dense sums take longer than before") for text in notes_in(folder))


def steps_in(folder: Path) -> list[int]:
    return [line["step"] for line in lines_in(folder) if line["kind"] == "train"]


def test_a_throttled_link_leads_to_another_choice(tmp_path: Path, log_schema: Schema) -> None:
    config = TrainConfig(
        model=ModelConfig("dlrm", embedding_dim=4, options={"bottom": [8], "top": [64, 64]}),
        batch_size=BATCH,
        log_every=5,
        cluster=ClusterConfig(workers=3, stores=0, colocated=True, dispatcher="round-robin"),
    )
    speeds = [Link(2e5), Link(1e7)]  # what the link becomes: slow, then fast again

    def throttle(network: Network, out: Path) -> None:
        due = max(steps_in(out), default=0) >= THROTTLED_AT if len(speeds) == 2 else is_chosen_again(out)
        if speeds and due:
            reshape(network, SLOW, speeds.pop(0))

    out = train_on([Link(1e7)] * 3, config, STEPS, tmp_path, log_schema, throttle)
    assert is_chosen_again(out), lines_in(out)
    assert steps_in(out)[-1] == STEPS
