"""Bytes that the kernel saw pass, per rank and interface.

The bridge's end of a link counts what the rank's end does, in the other direction, so one command reads them
all. Bytes are those of the packets as handed to the link: payload, and headers of Ethernet, IP and TCP. TCP
hands down pieces that a real card would cut into frames of 1,514 bytes, with headers each; the shaping
reckons with those frames, these counters do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from testbed import iproute, layout
from testbed.layout import Network


@dataclass(frozen=True)
class Traffic:
    """What one interface of one rank sent and received."""

    sent_bytes: int
    received_bytes: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent_bytes - earlier.sent_bytes, self.received_bytes - earlier.received_bytes)


@dataclass(frozen=True)
class Counters:
    """The traffic of every rank, on its shaped link (``haul``) and on its other one (``side``)."""

    haul: tuple[Traffic, ...]
    side: tuple[Traffic, ...]

    def __sub__(self, earlier: Counters) -> Counters:
        """What passed since ``earlier``."""
        return Counters(
            tuple(now - then for now, then in zip(self.haul, earlier.haul, strict=True)),
            tuple(now - then for now, then in zip(self.side, earlier.side, strict=True)),
        )


def read(network: Network) -> Counters:
    """The counters as they stand; take the difference of two readings."""
    ports = {
        port["ifname"]: Traffic(port["stats64"]["rx"]["bytes"], port["stats64"]["tx"]["bytes"])
        for port in iproute.ip_json(network.switch, "-statistics", "link", "show")
    }
    return Counters(
        tuple(ports[layout.haul_port(rank)] for rank in network.ranks),
        tuple(ports[layout.side_port(rank)] for rank in network.ranks),
    )
