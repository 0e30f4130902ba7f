"""The choice of a network interface.

By default Gloo binds to the address that the host's own name resolves to, on many machines 127.0.0.1,
and then waits forever for the other hosts. The right interface is the one that leads to the master.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass

import psutil

from rowhaul.errors import ClusterError
from rowhaul.transport.gloo import INTERFACE_VARIABLE


@dataclass(frozen=True)
class Interface:
    """A network interface (or several, as Gloo takes them: ``eth0,eth1``) and its first address."""

    name: str
    address: str
    chosen_by: str  # the reason, for messages


def choose(given: str | None, master_address: str, master_port: int) -> Interface:
    """Return the interface given here, or by the environment, or else the one that leads to the master."""
    if given:
        return _named(given, "as given")
    if os.environ.get(INTERFACE_VARIABLE):
        return _named(os.environ[INTERFACE_VARIABLE], f"{INTERFACE_VARIABLE} is set")
    return towards(master_address, master_port)


def listening_addresses(
    given: str | None, master_address: str, master_port: int, is_one_host: bool = False
) -> tuple[str, ...]:
    """Return the addresses of this host, rank 0's, where the other ranks will look for the master.

    That is the master's address. A name may mean 127.0.0.1 here and something else elsewhere, though, and
    behind a translated address it is none of this host's: then it is the address of the given interface, or
    else of the one that leads to the master or out of this host, as well.
    """
    try:
        found = socket.getaddrinfo(master_address, master_port, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    resolved = dict.fromkeys(_bare(str(target[0])) for *_, target in found)
    own = {one for addresses in addresses_by_interface().values() for one in addresses}
    here = tuple(one for one in resolved if one in own or is_loopback(one))
    inside = is_one_host or _means_this_machine(master_address)
    if here and (inside or not all(map(is_loopback, here))):
        return here
    names = given or os.environ.get(INTERFACE_VARIABLE)
    if names:
        return _named(names, "as given").address, *here
    try:
        outward = local_address(master_address, master_port) if resolved and not here else _outward_address()
    except OSError:  # no route
        return here or ("127.0.0.1",)
    return outward, *here


def towards(host: str, port: int) -> Interface:
    """Return the interface that leads to a host; raise `OSError` if there is no route or no such name."""
    address = local_address(host, port)
    for name, addresses in addresses_by_interface().items():
        if address in addresses:
            return Interface(name, address, f"it leads to {host}")
    raise ClusterError(
        f"{host} is reached from the address {address}, which is not on any interface that is up "
        f"({_listed()}): name the interface, or set {INTERFACE_VARIABLE}"
    )


def local_address(host: str, port: int) -> str:
    """Return the local address used to reach a host. Connecting a UDP socket sends nothing."""
    error: OSError | None = None
    for family, kind, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(target)
            except OSError as failed:
                error = failed
                continue
            return _bare(probe.getsockname()[0])
    raise error or OSError(f"{host} has no address")


def addresses_by_interface() -> dict[str, tuple[str, ...]]:
    """The IP addresses of every interface that is up, IPv4 first."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {
        name: tuple(
            _bare(one.address)
            for family in (socket.AF_INET, socket.AF_INET6)
            for one in addresses
            if one.family == family
        )
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def is_loopback(address: str) -> bool:
    """Whether an address reaches this machine only."""
    return ipaddress.ip_address(_bare(address)).is_loopback


def _means_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _outward_address() -> str:
    return local_address("198.51.100.1", 9)  # TEST-NET-2 of RFC 5737: belongs to nobody


def _named(names: str, chosen_by: str) -> Interface:
    found = addresses_by_interface()
    for name in names.split(","):
        if name not in found:
            raise ClusterError(
                f"there is no interface {name!r} with an address that is up ({chosen_by}); "
                f"this host has {_listed()}"
            )
    return Interface(names, found[names.split(",")[0]][0], chosen_by)


def _listed() -> str:
    found = addresses_by_interface().items()
    return "; ".join(f"{name}: {', '.join(addresses)}" for name, addresses in found) or "none"


def _bare(address: str) -> str:
    return address.split("%")[0]  # fe80::1%eth0
