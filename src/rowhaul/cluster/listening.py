"""What of a run listens where: for `rowhaul netcheck`, and for anyone who sets up a firewall.

Sockets of ranks, of the processes they have started and of the one that started them are listed as the kernel
knows them, not as we believe them to be.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from rowhaul.cluster.cluster import Cluster
from rowhaul.cluster.interface import addresses_by_interface, is_loopback
from rowhaul.cluster.rendezvous import hosted_ports

ALL_INTERFACES = "all interfaces"
THIS_HOST = "this host only"


@dataclass(frozen=True)
class Listener:
    """A TCP socket that accepts connections."""

    process: int
    what: str
    address: str
    port: int
    reach: str  # who can connect: an interface's name, `THIS_HOST` or `ALL_INTERFACES`


def listeners(cluster: Cluster) -> list[Listener]:
    """Return what this rank listens with; on the first rank of a host, also the process that started it."""
    own = psutil.Process()
    found = [
        Listener(own.pid, "rendezvous store" if port in hosted_ports() else "Gloo", address, port, reach)
        for address, port, reach in _sockets(own)
    ]
    for child in own.children(recursive=True):
        found += [Listener(child.pid, "heartbeat", *where) for where in _sockets(child)]
    parent = own.parent()
    if parent is not None and cluster.rank == min(cluster.local_ranks):
        found += [
            Listener(parent.pid, what, *where)
            for where in _sockets(parent)
            if (what := _of_parent(cluster, where[1]))
        ]
    return sorted(found, key=lambda one: (one.what, one.address, one.port))


def _of_parent(cluster: Cluster, port: int) -> str:
    """Return what a socket of the launcher is; empty for one that has nothing to do with the run."""
    if port == cluster.place.master_port:
        return "launcher's store" if cluster.place.launcher_keeps_store else "torchrun's store"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else ""


def _sockets(process: psutil.Process) -> Iterator[tuple[str, int, str]]:
    """Return address, port and reach of each socket on which a process listens."""
    with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
        connections = getattr(process, "net_connections", None) or process.connections
        for one in connections(kind="tcp"):
            if one.status == psutil.CONN_LISTEN:
                yield one.laddr.ip, one.laddr.port, _reach(one.laddr.ip)


def _reach(address: str) -> str:
    if address in ("0.0.0.0", "::"):
        return ALL_INTERFACES
    if is_loopback(address):
        return THIS_HOST
    names = (name for name, addresses in addresses_by_interface().items() if address in addresses)
    return next(names, address)
