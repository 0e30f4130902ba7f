"""The layout of a network: ranks, their links and addresses, and how to enter them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from rowhaul.simulate.links import Link, parse_link
from testbed import iproute, names
from testbed.errors import TestbedError

HAUL, SIDE = "haul0", "side0"  # a rank's shaped interface, and its unshaped one
HAUL_BRIDGE, SIDE_BRIDGE = "haul", "side"
MOST_RANKS = 250

_HAUL_NET, _SIDE_NET = ipaddress.ip_address("10.64.0.0"), ipaddress.ip_address("10.65.0.0")
_SWITCH_HOST = 254
PREFIX_LENGTH = 24


@dataclass(frozen=True)
class Network:
    """Workers, then stores, each in a namespace of its own with a link of its own."""

    name: str
    workers: tuple[Link, ...]
    stores: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if not self.links:
            raise TestbedError("a network needs at least one link")
        if len(self.links) > MOST_RANKS:
            raise TestbedError(f"{len(self.links)} ranks do not fit a testbed; it takes up to {MOST_RANKS}")
        for link in self.links:
            if link.latency_seconds:
                raise TestbedError(f"link {link}: the testbed shapes speeds only; leave the latency out")

    @property
    def links(self) -> tuple[Link, ...]:
        """Every rank's link, workers first."""
        return (*self.workers, *self.stores)

    @property
    def ranks(self) -> range:
        """The ranks, workers first."""
        return range(len(self.links))

    @property
    def switch(self) -> str:
        """The namespace of the bridges."""
        return names.switch_of(self.name)

    @property
    def switch_address(self) -> str:
        """The bridge's own address among the shaped links: messages to it pass one link only."""
        return str(_HAUL_NET + _SWITCH_HOST)

    def namespace(self, rank: int) -> str:
        """The namespace of a rank."""
        return names.rank_of(self.name, rank)

    def role(self, rank: int) -> str:
        """Whether a rank is a ``worker`` or a ``store``."""
        return "worker" if rank < len(self.workers) else "store"

    def haul_address(self, rank: int) -> str:
        """A rank's address on its shaped link."""
        return str(_HAUL_NET + rank + 1)

    def side_address(self, rank: int) -> str:
        """A rank's address on its unshaped link."""
        return str(_SIDE_NET + rank + 1)

    def inside(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command as a rank."""
        return iproute.inside(self.namespace(rank), command)


def haul_port(rank: int) -> str:
    """The bridge's end of a rank's shaped link."""
    return f"haul-r{rank}"


def side_port(rank: int) -> str:
    """The bridge's end of a rank's unshaped link."""
    return f"side-r{rank}"


def description(network: Network, rank: int) -> str:
    """Describe a port in its alias, for ``existing`` to read back: the kernel stores the description."""
    return f"{network.role(rank)} {round(network.links[rank].bytes_per_second * 8)}bit"


def find(name: str) -> str:
    """The full name of a network that was left up."""
    if names.kept_name(name) not in names.networks():
        others = ", ".join(names.kept_networks()) or "none"
        raise TestbedError(
            f"no network {name!r} is up (up: {others}); `python -m testbed up --links ...` makes one"
        )
    return names.kept_name(name)


def existing(name: str) -> Network:
    """A network that was left up, as its bridge describes it."""
    network_name = find(name)
    aliases = {
        port["ifname"]: port["ifalias"]
        for port in iproute.ip_json(names.switch_of(network_name), "link", "show")
        if "ifalias" in port
    }
    links: dict[str, list[Link]] = {"worker": [], "store": []}
    for rank in range(len(aliases)):
        role, speed = aliases[haul_port(rank)].split()
        links[role].append(parse_link(speed, "alias"))
    return Network(network_name, tuple(links["worker"]), tuple(links["store"]))
