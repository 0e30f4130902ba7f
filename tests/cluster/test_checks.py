"""Facts that ranks compare before they train."""

import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from checkpointed_ranks import ThreadCluster, on_threads
from rowhaul.cluster import waiting
from rowhaul.cluster.checks import check_same, gather_texts, version_facts
from rowhaul.cluster.heartbeat import Heartbeat
from rowhaul.cluster.place import Place
from rowhaul.cluster.store_client import StoreClient
from rowhaul.cluster.store_server import StoreServer
from rowhaul.cluster.watchdog.settings import Settings
from rowhaul.errors import ClusterError
from rowhaul.schedule import Topology
from rowhaul.transport.in_process import InProcessNetwork


def compared(*facts, num_workers=2):
    on_threads(Topology(num_workers), lambda cluster: check_same(cluster, facts[cluster.rank]))


def test_facts_that_differ_are_named_with_the_ranks_that_have_them():
    compared({"a": "1"}, {"a": "1"}, {"a": "1"})
    with pytest.raises(ClusterError, match=r"\n  a: 1 on ranks 0, 2.*; 2 on rank 1"):
        compared({"a": "1"}, {"a": "2"}, {"a": "1"})
    with pytest.raises(ClusterError, match=r"\n  a: 1 on rank 0.*; \(not given\) on ranks 1-2"):
        compared({"a": "1"}, {}, {})


def test_a_fact_does_not_matter_where_it_is_none():
    compared({"a": "1"}, {"a": "1"}, {"a": None})
    compared({"a": None}, {"a": None}, {"a": None})
    with pytest.raises(ClusterError, match=r"a: 1 on rank 0.*; 2 on rank 1"):
        compared({"a": "1"}, {"a": "2"}, {"a": None})


def test_a_rank_may_begin_a_minute_after_the_others(monkeypatch):
    hurried = SimpleNamespace(monotonic=lambda: 60 * time.monotonic(), sleep=time.sleep)
    monkeypatch.setattr(waiting, "time", hurried)

    def begin(cluster):
        if cluster.rank == 0:
            time.sleep(1.0)  # a minute by that clock
        check_same(cluster, {"a": "1"})

    on_threads(Topology(2), begin)


def test_stores_may_have_another_cpu_than_workers():
    worker, store = version_facts(), version_facts(is_worker=False)
    (capability,) = (name for name in worker if "ATEN_CPU_CAPABILITY" in name)
    assert store == {**worker, capability: None}
    assert {"version of numba", "version of llvmlite"} <= worker.keys()


@pytest.mark.parametrize(("launched", "keeper"), [(True, "its launcher"), (False, "rank 0")])
def test_a_store_that_is_gone_is_named_where_no_rank_is_known_to_be_lost(launched, keeper):
    server = StoreServer([socket.create_server(("127.0.0.1", 0))], None)
    store = StoreClient(socket.create_connection(("127.0.0.1", server.port)), None, 20.0)
    cluster = ThreadCluster(1, Topology(1), InProcessNetwork(2), store)
    cluster.place = Place(1, 2, "127.0.0.1", 1, launcher_keeps_store=launched)
    beat = Settings(1, os.getpid(), "run", cluster.roles, ("", ""), "127.0.0.1", interval=0.01, num_missed=1)
    cluster.heartbeat = Heartbeat(beat, cluster.failure)
    server.close()
    with pytest.raises(
        ClusterError, match=f"'save': the connection to the rendezvous store .*: {keeper}, wh"
    ):
        gather_texts(cluster, "save", "text")
