"""What is ``auto``: the dispatcher and how rows are synchronised hang on hosts, links and rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rowhaul.errors import ConfigError
from rowhaul.pruning.config import PruneConfig
from rowhaul.schedule import HotRows, RowPolicy, RowSizes, Topology
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import TrainConfig


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


@pytest.mark.parametrize(("links", "num_hosts"), [("equal", 2), ("measure", 1), ("50mbit*2", 3)])
def test_auto_is_round_robin_wherever_rows_stay_at_home(links, num_hosts):
    config = ClusterConfig(workers=2, colocated=True, sync="at-home", links=links)
    assert config.on_hosts(num_hosts).dispatcher == "round-robin"
    assert chosen_sync(config, num_hosts) == "at-home"


def test_auto_minimises_moves_where_hosts_are_unknown():
    sizes = RowSizes(values=(64,), state=(4,))
    assert ClusterConfig().schedule(Topology(num_workers=2), sizes).dispatcher == "joint"


ON_ONE_HOST = ClusterConfig(workers=2, colocated=True)
SIZES = RowSizes(values=(64,), state=(4,))


def chosen_sync(config, num_hosts, *, policies=(), may_stay_home=True):
    topology = config.topology()
    settings = config.on_hosts(num_hosts).schedule(
        topology, SIZES, policies=policies, may_stay_home=may_stay_home
    )
    return settings.sync


def test_rows_stay_at_home_on_one_host():
    assert chosen_sync(ON_ONE_HOST, 1) == "at-home"
    assert chosen_sync(ON_ONE_HOST.on_hosts(1), 1) == "at-home", "also if it is asked twice"
    assert chosen_sync(replace(ON_ONE_HOST, dispatcher="random"), 1) == "at-home"
    assert chosen_sync(replace(ON_ONE_HOST, shares="2,1"), 1) == "at-home"


@pytest.mark.parametrize(
    "change",
    [
        {"colocated": False},
        {"dispatcher": "joint"},
        {"links": "measure"},
        {"cache": "64MiB"},
        {"cache_policy": "lfu"},
        {"hot_rows": 10},
        {"hot_rows": "auto"},
        {"first_touch": False},
        {"sync": "on-demand"},
    ],
    ids=str,
)
def test_rows_move_by_plans_where_something_asks_for_them(change):
    assert chosen_sync(replace(ON_ONE_HOST, **change), 1) == "on-demand"


def test_rows_move_by_plans_between_hosts_and_where_they_are_not_whole():
    assert chosen_sync(ON_ONE_HOST, 2) == "on-demand"
    assert chosen_sync(ON_ONE_HOST, 1, may_stay_home=False) == "on-demand"
    assert chosen_sync(ON_ONE_HOST, 1, policies=(RowPolicy(admit_after=2),)) == "on-demand"
    assert ClusterConfig().schedule(Topology(num_workers=2), SIZES).sync == "on-demand"


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        ({"colocated": False}, "workers that store rows themselves"),
        ({"dispatcher": "joint"}, "a dispatcher that does not look at rows"),
    ],
)
def test_what_needs_a_plan_is_refused_at_home(change, needs):
    config = replace(ON_ONE_HOST, sync="at-home", **change)
    with pytest.raises(ConfigError, match=f"at-home plans no rows, so it needs {needs}.* such as on-demand"):
        chosen_sync(config, 1)


@pytest.mark.parametrize("what", ["policies", "hot rows"])
def test_policies_and_hot_rows_need_a_plan(what):
    policies = (RowPolicy(ttl=3),) if what == "policies" else ()
    hot = HotRows(np.zeros(1, np.int32), np.ones(1, np.int64)) if what == "hot rows" else None
    config = replace(ON_ONE_HOST, sync="at-home").on_hosts(1)
    with pytest.raises(ConfigError, match="at-home plans no rows"):
        config.schedule(config.topology(), SIZES, policies=policies, hot=hot)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("hot_rows", 10),
        ("hot_rows", "auto"),
        ("cache", "64MiB"),
        ("cache_policy", "lfu"),
        ("first_touch", False),
    ],
)
def test_settings_of_caches_and_rows_at_home_are_refused_at_once(name, given):
    with pytest.raises(ConfigError, match=f"moves no rows, but cluster.{name} is {given}: set it to "):
        ClusterConfig(sync="at-home", **{name: given})


AT_HOME = replace(ON_ONE_HOST, sync="at-home")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"row_dtype": "int8"}, "sync is at-home, .* but row_dtype is int8"),
        ({"device": "cuda"}, "sync is at-home, .* but device is cuda"),
        ({"tables": {"default": {"ttl": 3}}}, "sync is at-home, .* but tables have policies"),
        ({"prune": PruneConfig(ratio="50%")}, "sync is at-home, which does not go together with prune"),
        ({"prune": PruneConfig(budget="1MiB")}, "at-home, which does not go together with prune.budget"),
    ],
    ids=str,
)
def test_rows_that_cannot_stay_at_home_are_refused_before_a_run(given, why):
    with pytest.raises(ConfigError, match=why):
        TrainConfig(cluster=AT_HOME, **given)
    TrainConfig(cluster=replace(AT_HOME, workers=0), **given)  # in one process nothing is synchronised
    TrainConfig(cluster=ON_ONE_HOST, **given)
