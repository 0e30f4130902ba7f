"""On slow links a run tells that one machine would be faster, and by how much; on quick ones it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from throttled_runs import notes_in, train_on

from rowhaul.data.schema import Schema
from rowhaul.simulate.links import Link
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import ModelConfig, TrainConfig

pytestmark = pytest.mark.slow

STEPS = 130  # it is told after 100
# Layers that take a tenth of a second, however busy this machine is: longer than all else on quick links.
DEEP_LAYERS = """
import time
from rowhaul.train.trainer import Trainer

learn = Trainer.learn

def slowly(self, *given):
    time.sleep(0.1)
    return learn(self, *given)

Trainer.learn = slowly
"""


@pytest.mark.parametrize(
    ("bytes_per_second", "before", "is_told"), [(2e6, "", True), (1e8, DEEP_LAYERS, False)]
)
def test_one_machine_is_advised_where_links_are_slow(
    bytes_per_second: float, before: str, is_told: bool, tmp_path: Path, log_schema: Schema
) -> None:
    config = TrainConfig(
        model=ModelConfig("dlrm", embedding_dim=16, options={"bottom": [64], "top": [256, 256]}),
        batch_size=2000,
        cluster=ClusterConfig(workers=2, stores=0, colocated=True),
    )
    out = train_on(
        [Link(bytes_per_second)] * 2, config, STEPS, tmp_path, log_schema, lambda network, out: None, before
    )
    told = [text for text in notes_in(out) if text.startswith("one machine: faster: at most ")]
    assert len(told) == is_told
