"""Setting up training: plans on a rank that does not lead its host, and rows by how ranks were joined."""

import threading
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from checkpointed_ranks import Session, on_threads
from rowhaul._threads import Failure
from rowhaul.data.stream import SampleStream
from rowhaul.planning.sharing import LeaderLostError
from rowhaul.schedule import Topology
from rowhaul.train.cluster_config import ClusterConfig
from rowhaul.train.distributed import setup
from rowhaul.train.trainer import Trainer


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


@pytest.mark.parametrize("config", [None, ClusterConfig(colocated=True), ClusterConfig(colocated=False)])
@pytest.mark.parametrize(("colocated", "chosen"), [(True, "at-home"), (False, "on-demand")])
def test_rows_stay_at_home_where_ranks_were_joined_co_located(
    colocated, chosen, config, tmp_path, log_schema
):
    session = Session.on_log(tmp_path, log_schema)

    def work(cluster):
        cluster.hosts = (tuple(range(cluster.num_ranks)),)
        trainer = Trainer(session.config, session.schema)
        stream = SampleStream(session.data, session.schema, session.config.batch_size)
        training = setup.distribute(cluster, trainer.model, stream, config)
        training.close()
        return training.settings.sync

    assert set(on_threads(Topology(2, colocated=colocated), work)) == {chosen}
