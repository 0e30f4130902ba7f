"""Ranks count as one host only if memory passes between them."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rowhaul.cluster.neighbours import NeighbourProbe
from rowhaul.cluster.roll_call import Member
from rowhaul.cluster.store_client import StoreClient
from rowhaul.cluster.store_server import StoreServer
from rowhaul.schedule.topology import Topology

SECRET = b"a secret of this test"


def hosts_of(change, secrets):
    """The host of each rank, as every rank sees it; ``change`` makes rank 1 differ."""
    server = StoreServer([socket.create_server(("127.0.0.1", 0))], SECRET)
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        probes = [stack.enter_context(NeighbourProbe(secret)) for secret in secrets]
        topology = Topology(len(probes), num_stores=1, colocated=True)
        members = [
            Member(rank, f"id of rank {rank}", "host", "name", "127.0.0.1", 1, topology, probe=probe.address)
            for rank, probe in enumerate(probes)
        ]
        members = [change(member) for member in members]

        def confirm(rank):
            store = StoreClient(socket.create_connection(("127.0.0.1", server.port)), SECRET, 20.0)
            return [one.host for one in probes[rank].confirm(store, members, rank)]

        with ThreadPoolExecutor(len(probes)) as pool:
            seen = list(pool.map(confirm, range(len(probes))))
    assert all(one == seen[0] for one in seen)
    return seen[0]


def test_ranks_that_pass_memory_are_one_host():
    assert hosts_of(lambda member: member, [SECRET] * 3) == ["host"] * 3


def test_a_rank_without_the_secret_is_a_host_of_its_own(caplog):
    hosts = hosts_of(lambda member: member, [SECRET, b"another secret altogether", SECRET])
    assert hosts == ["host", "host/rank 1", "host"]
    assert "rank 1 uses the network to rank 0 of the same host" in caplog.text


def test_a_rank_that_cannot_be_reached_is_alone(caplog):
    def change(member):
        return replace(member, probe="@rowhaul-nobody-listens") if member.rank == 0 else member

    assert hosts_of(change, [SECRET] * 2) == ["host", "host/rank 1"]
    assert "Connection refused" in caplog.text


@pytest.mark.parametrize("probe", ["", "@rowhaul-nobody-listens"])
def test_ranks_grouped_by_hand_or_alone_are_not_tried(probe):
    def change(member):
        return replace(member, probe=probe, host=member.host if not probe else str(member.rank))

    assert hosts_of(change, [SECRET] * 2) == (["host"] * 2 if not probe else ["0", "1"])
