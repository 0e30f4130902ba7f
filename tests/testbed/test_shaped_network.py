"""The network is what it says: joined, apart from the machine's, and as fast as its links are shaped."""

import json
import subprocess

import pytest

from rowhaul.simulate.links import Link
from testbed import ShapedNetwork, TestbedError, TestbedUnavailable, measure
from testbed import network as networking

pytestmark = pytest.mark.slow

TRIES = 3  # a busy machine may disturb a measurement


def interfaces(prefix=()):
    said = subprocess.run(
        [*prefix, "ip", "-j", "address"], capture_output=True, check=True, timeout=20
    ).stdout
    return {interface["ifname"]: interface for interface in json.loads(said)}


def test_every_rank_has_its_interfaces_up_and_no_others(network):
    for rank in network.ranks:
        found = interfaces(network.inside(rank, []))
        assert set(found) == {"lo", "haul0", "side0"}
        assert all("UP" in interface["flags"] for interface in found.values())
        addresses = {name: [a["local"] for a in found[name]["addr_info"]] for name in ("haul0", "side0")}
        assert addresses == {"haul0": [network.haul_address(rank)], "side0": [network.side_address(rank)]}


def test_the_machines_own_network_is_not_touched():
    before = set(interfaces())
    with ShapedNetwork([Link(1e6)] * 2):
        assert set(interfaces()) == before
    assert set(interfaces()) == before


def test_a_rank_cannot_reach_beyond_its_network(network):
    said = subprocess.run(
        network.inside(0, ["ip", "route", "get", "192.0.2.1"]), capture_output=True, text=True, timeout=20
    )
    assert said.returncode != 0
    assert "unreachable" in said.stderr


def test_links_carry_what_they_are_shaped_to_in_both_directions_at_once(network):
    shaped = network.links[0].bytes_per_second
    for _ in range(TRIES):
        speeds = measure.measure_pair(network, 0, 1, 3_000_000)
        if all(0.7 < speed / shaped < 1.1 for speed in (speeds.sent, speeds.received)):
            return
    pytest.fail(f"a link of {8 * shaped:.3g} bit/s carried {speeds}")


def test_unequal_links_are_unequal_when_used_together(network):
    for _ in range(TRIES):
        speeds = measure.measure_links(network, 0.7, together=True)
        relative = [s.received / link.bytes_per_second for s, link in zip(speeds, network.links, strict=True)]
        if all(0.7 < share < 1.1 for share in relative):
            return
    pytest.fail(f"links of {network.links} carried {speeds}")


def test_links_that_cannot_be_had_are_refused():
    with pytest.raises(TestbedError, match="latency"):
        ShapedNetwork([Link(1e6, latency_seconds=0.001)])
    with pytest.raises(TestbedError, match="at least one"):
        ShapedNetwork([])
    with pytest.raises(TestbedError, match="up to 250"):
        ShapedNetwork([Link(1e6)] * 251)


def test_the_reason_is_given_where_there_can_be_no_testbed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TestbedUnavailable, match="install iproute2"):
        networking.check_available()


def test_another_user_is_told_to_be_root(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 65534)
    with pytest.raises(TestbedUnavailable, match="take root"):
        networking.check_available()
