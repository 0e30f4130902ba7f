"""Which interface is chosen, and that the environment is left as it was."""

import os
import socket

import psutil
import pytest

from rowhaul.cluster.interface import Interface, choose, is_loopback, listening_addresses, towards
from rowhaul.cluster.joining import _avoid_loopback
from rowhaul.cluster.roll_call import Member, Roster
from rowhaul.errors import ClusterError
from rowhaul.schedule.topology import Topology
from rowhaul.transport.gloo import INTERFACE_VARIABLE, bound_to

LOOPBACK = towards("127.0.0.1", 1).name
OUTSIDE = [
    (name, one.address)
    for name, addresses in psutil.net_if_addrs().items()
    for one in addresses
    if one.family.name == "AF_INET" and not is_loopback(one.address) and psutil.net_if_stats()[name].isup
]


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(INTERFACE_VARIABLE, raising=False)


def test_the_interface_is_the_one_that_leads_to_the_master():
    chosen = choose(None, "127.0.0.1", 1)
    assert (chosen.name, chosen.address) == (LOOPBACK, "127.0.0.1")
    for name, address in OUTSIDE:
        assert choose(None, address, 1).name == name


def test_what_the_user_says_comes_first(monkeypatch):
    name = OUTSIDE[0][0] if OUTSIDE else LOOPBACK
    monkeypatch.setenv(INTERFACE_VARIABLE, name)
    assert choose(None, "127.0.0.1", 1).name == name
    assert choose(LOOPBACK, "127.0.0.1", 1).name == LOOPBACK


def test_an_interface_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    with pytest.raises(ClusterError, match=rf"no interface 'wlan77'.*as given.*{LOOPBACK}: 127.0.0.1"):
        choose("wlan77", "127.0.0.1", 1)
    monkeypatch.setenv(INTERFACE_VARIABLE, f"{LOOPBACK},wlan77")
    with pytest.raises(ClusterError, match=f"no interface 'wlan77'.*{INTERFACE_VARIABLE} is set"):
        choose(None, "127.0.0.1", 1)


@pytest.mark.parametrize("before", [None, "eth7"])
def test_the_environment_is_restored(monkeypatch, before):
    if before:
        monkeypatch.setenv(INTERFACE_VARIABLE, before)
    with bound_to("eth9"):
        assert os.environ[INTERFACE_VARIABLE] == "eth9"
    assert os.environ.get(INTERFACE_VARIABLE) == before


@pytest.mark.skipif(not OUTSIDE, reason="this machine has no network")
def test_a_master_whose_own_name_is_the_loopback_goes_by_the_other_ranks():
    name, address = OUTSIDE[0]
    topology = Topology(2, colocated=True)
    there = Member(1, "b", "host b", "b", address, 2, topology)
    here = Member(0, "a", "host a", "a", "127.0.0.1", 1, topology)
    loopback = Interface(LOOPBACK, "127.0.0.1", "")
    assert _avoid_loopback(loopback, Roster("", (here, there))).name == name
    assert _avoid_loopback(loopback, Roster("", (here, here))) is loopback


def test_rank_0_listens_at_the_masters_address_only():
    assert listening_addresses(None, "127.0.0.1", 1) == ("127.0.0.1",)
    assert "127.0.0.1" in listening_addresses(None, "localhost", 1)
    assert all(map(is_loopback, listening_addresses(None, "localhost", 1)))
    for _, address in OUTSIDE:
        assert listening_addresses(None, address, 1) == (address,)
        assert listening_addresses(LOOPBACK, address, 1) == (address,)  # rows go elsewhere


@pytest.mark.parametrize("master", ["198.51.100.7", "no-such-host.invalid"])
def test_behind_a_foreign_address_rank_0_listens_at_the_given_interface(master):
    """An address that is translated on the way is none of this host's."""
    assert listening_addresses(LOOPBACK, master, 1) == ("127.0.0.1",)
    assert len(listening_addresses(None, master, 1)) == 1


@pytest.mark.skipif(not OUTSIDE, reason="this machine has no network")
def test_a_name_that_is_the_loopback_here_is_not_so_elsewhere(monkeypatch):
    """As in /etc/hosts of many distributions: other hosts resolve the same name to another address."""
    real = socket.getaddrinfo

    def resolve(host, *rest, **named):
        return real("127.0.1.1" if host == "ada" else host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    name, address = OUTSIDE[0]
    assert listening_addresses(name, "ada", 1) == (address, "127.0.1.1")
    assert listening_addresses(None, "ada", 1, is_one_host=True) == ("127.0.1.1",)
