"""Clusters whose checkpoints are tested: topologies, modes, caches, hot rows, policies."""

from __future__ import annotations

from dataclasses import replace

from checkpointed_ranks import CONFIG
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.config import OptimizerConfig

HOT = [0, 7919, 2 * 7919, 5 * 7919, 10**9]  # the last is in no batch
ADAM = replace(CONFIG, rows=OptimizerConfig("adam", 0.01), dense=OptimizerConfig("Adam", 0.01))

# When it is saved, of some split rows one worker has handed its gradient in, and another has not.
TIGHT = ClusterConfig(workers=3, cache="60", dispatcher="random")
SAVED = 4
AT_HOME = ClusterConfig(workers=3, colocated=True, sync="at-home", dispatcher="round-robin")

LAYOUTS: dict[str, dict[str, object]] = {
    "store": {},
    "adam, float32": {"config": replace(ADAM, precision="float32")},
    "two stores, lfu": {"cluster": replace(TIGHT, stores=2, cache_policy="lfu")},
    "peer to peer, lru, adam": {"cluster": replace(TIGHT, peer_to_peer=True), "config": ADAM},
    "co-located, emark": {"cluster": replace(TIGHT, colocated=True, cache_policy="emark")},
    "co-located, peers, belady": {
        "cluster": replace(TIGHT, colocated=True, peer_to_peer=True, cache_policy="belady")
    },
    "hot rows": {"cluster": ClusterConfig(workers=3, cache="70"), "hot": HOT},
    "hot rows, co-located": {"cluster": ClusterConfig(3, colocated=True, cache="70"), "hot": HOT},
    "full": {"cluster": ClusterConfig(workers=3, sync="full", cache="70")},
    "no look-ahead": {"cluster": ClusterConfig(workers=3, look_ahead=0, cache="70")},
    "static": {"cluster": ClusterConfig(workers=3, sync="static", hot_rows=5), "hot": HOT},
    "bounded:0": {"cluster": ClusterConfig(workers=3, sync="bounded:0", cache="70")},
    "bounded:2": {"cluster": ClusterConfig(workers=3, sync="bounded:2", cache="70")},
    "bounded:2, co-located": {"cluster": ClusterConfig(3, colocated=True, sync="bounded:2", cache="70")},
    "shares, laia-adaptive": {
        "cluster": ClusterConfig(workers=3, shares="3,1,0", dispatcher="laia-adaptive:1", cache="190")
    },
    "admission": {
        "cluster": ClusterConfig(workers=3, cache="70"),
        "config": replace(CONFIG, tables={"default": {"admit_after": 2}}),
    },
    "rows that are forgotten": {
        "cluster": replace(TIGHT, peer_to_peer=True),
        "config": replace(CONFIG, tables={"default": {"ttl": 3}, "item": {"max_rows": 30, "evict": "lfu"}}),
    },
    "at home": {"cluster": AT_HOME},
    "at home, adam, shares": {"cluster": replace(AT_HOME, shares="3,1,0"), "config": ADAM},
    "all rows count": {"cluster": ClusterConfig(workers=2, stores=2, first_touch=False, cache="70")},
}
