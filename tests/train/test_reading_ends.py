"""A cluster that stops before its data ends reads no further: no thread stays behind."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from checkpointed_ranks import CLUSTER, Session
from rowhaul.train.cluster_config import ClusterConfig


@pytest.mark.parametrize("cluster", [CLUSTER, ClusterConfig(workers=2, colocated=True, cache="190")])
def test_the_thread_that_reads_ends_with_training(cluster, log_schema, tmp_path):
    (tmp_path / "log").mkdir()
    session = replace(Session.on_log(tmp_path / "log", log_schema), cluster=cluster)
    before = set(threading.enumerate())
    session.on_threads(tmp_path / "run")
    left = [thread for thread in set(threading.enumerate()) - before if thread.name == "rowhaul-prefetch"]
    for thread in left:  # it may be about to end
        thread.join(10)
    assert not [thread for thread in left if thread.is_alive()]
