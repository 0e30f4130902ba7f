"""A few faults of each family thrown at a small cluster; `python -m testbed chaos` throws hundreds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from testbed.chaos.campaign import Campaign, Outcome
from testbed.chaos.faults import ALL
from testbed.chaos.learned import difference
from testbed.chaos.table import table

FAMILIES = (
    "SIGKILL of a rank while it saves",
    "SIGTERM to all ranks, repeated",
    "checkpoint bit flipped",
    "disk full",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_of_several_kinds_end_as_promised(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])  # where ranks find the testbed
    said: list[str] = []
    campaign = Campaign(tmp_path, 5, [kind for kind in ALL if kind.name in FAMILIES], said.append)
    campaign.go(len(FAMILIES))
    assert [one.trouble for one in campaign.outcomes] == [""] * len(FAMILIES), said
    assert all(run.apart <= run.allowed for run in campaign.runs), said
    assert campaign.num_kept == len(FAMILIES)


def test_one_flipped_bit_is_a_difference():
    one, other = {"w": np.ones(3, np.float32)}, {"w": np.ones(3, np.float32)}
    assert difference(one, other) == 0
    other["w"].view(np.uint8)[5] ^= 1
    assert 0 < difference(one, other) < 1
    assert difference(one, {"w": np.ones(2, np.float32)}) == float("inf")
    negative_zero = {"w": np.array([-0.0], np.float32)}
    assert difference({"w": np.zeros(1, np.float32)}, negative_zero) > 0


def test_the_table_counts_broken_promises():
    killed = ALL[0]
    text = table([Outcome(killed, 0, 3, 1, 2.0), Outcome(killed, 0, 9, 2, 0.0, trouble="it hung")])
    assert f"| {killed.name} | 2 | 1 |" in text
