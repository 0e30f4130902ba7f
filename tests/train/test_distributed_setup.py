"""Setting up plans on a rank that does not lead its host."""

import threading
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from rowhaul._threads import Failure
from rowhaul.planning.sharing import LeaderLostError
from rowhaul.train.distributed import setup


def client_of(failure):
    """Wait for a leader that never announces its socket."""
    cluster = SimpleNamespace(
        store=HashStore(), failure=failure, leader=1, rank=0, secret=None, next_meeting=lambda what: 0
    )
    return setup._Feeding(cluster, None, None, None, setup.Start())._client()


def test_the_wait_for_the_leader_ends_when_a_rank_is_lost():
    failure = Failure()
    threading.Timer(0.3, failure.set, [KeyError("lost")]).start()
    with pytest.raises(KeyError, match="lost"):
        client_of(failure)


def test_a_leader_that_does_not_begin_is_named(monkeypatch):
    monkeypatch.setattr(setup, "ARRIVAL_SECONDS", 0.3)
    with pytest.raises(LeaderLostError, match=r"rank 1, which plans .*, has not begun within 0\.3 s"):
        client_of(Failure())
