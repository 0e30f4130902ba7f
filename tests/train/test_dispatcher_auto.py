"""`dispatcher: auto`: the quickest where links cost nothing, the one that moves least elsewhere."""

from __future__ import annotations

import pytest

from rowhaul.schedule import RowSizes, Topology
from rowhaul.train.cluster_config import ClusterConfig


@pytest.mark.parametrize(
    ("given", "links", "num_hosts", "chosen"),
    [
        ("auto", "equal", 1, "round-robin"),
        ("auto", "equal", 2, "joint"),
        ("auto", "measure", 1, "joint"),
        ("auto", "50mbit*2,5mbit", 1, "joint"),
        ("laia", "equal", 1, "laia"),
    ],
)
def test_auto_depends_on_hosts_and_links(given, links, num_hosts, chosen):
    config = ClusterConfig(dispatcher=given, links=links)
    assert config.on_hosts(num_hosts).dispatcher == chosen


def test_auto_minimises_moves_where_hosts_are_unknown():
    sizes = RowSizes(values=(64,), state=(4,))
    assert ClusterConfig().schedule(Topology(num_workers=2), sizes).dispatcher == "joint"
