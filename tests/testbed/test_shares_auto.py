"""`shares: auto` on shaped links: workers that help are used, and left out once their link is throttled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from throttled_runs import notes_in, train_on

from rowhaul.data.schema import Schema
from rowhaul.simulate.links import Link
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import ModelConfig, TrainConfig
from testbed.layout import Network
from testbed.network import reshape

pytestmark = pytest.mark.slow

BATCH, STEPS, SLOW = 96, 240, 2
# A sample takes a millisecond that needs no processor: three machines are three times as fast as one even
# where all of them share two cores.
SLOWLY = """
import time
from rowhaul.nn.models.dlrm import DLRM

forward = DLRM.forward

def slowly(self, batch):
    time.sleep(1e-3 * len(batch))
    return forward(self, batch)

DLRM.forward = slowly
"""


def test_a_throttled_link_is_noticed_and_its_worker_left_out(tmp_path: Path, log_schema: Schema) -> None:
    config = TrainConfig(
        model=ModelConfig("dlrm", embedding_dim=4, options={"bottom": [8], "top": [64, 64]}),
        batch_size=BATCH,
        cluster=ClusterConfig(workers=3, stores=0, colocated=True, shares="auto", dispatcher="round-robin"),
    )
    throttled: list[int] = []

    def throttle_once_decided(network: Network, out: Path) -> None:
        if not throttled and any(text.startswith("shares [") for text in notes_in(out)):
            throttled.append(len(notes_in(out)))
            reshape(network, SLOW, Link(5e4))

    out = train_on([Link(5e6)] * 3, config, STEPS, tmp_path, log_schema, throttle_once_decided, SLOWLY)
    notes = notes_in(out)
    first, *others = [text for text in notes if text.startswith("shares [")]
    assert shares_in(first)[SLOW] > 0, notes
    assert any(text.startswith("shares are looked at again: iterations take longer") for text in notes), notes
    assert others, notes
    assert shares_in(others[0])[SLOW] == 0, notes
    assert any(text.startswith("left out from iteration") for text in notes), notes


def shares_in(note: str) -> list[int]:
    return json.loads(note.removeprefix("shares ").partition("]")[0] + "]")
