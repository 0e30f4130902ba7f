"""The rendezvous store: a small key-value server at the master's address that all ranks can reach.

Under torchrun and under our own launcher the parent process hosts it, otherwise rank 0 does. It is reached
before anything else, so most problems with an address, a port or a firewall show here; errors say what was
tried.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # compiled

from rowhaul.cluster.interface import Interface, choose
from rowhaul.cluster.place import Place
from rowhaul.cluster.waiting import within
from rowhaul.errors import ClusterError

__all__ = ["PrefixStore", "Store", "TCPStore", "connect", "first_line", "keep_store", "reach_store"]

_OPERATION = timedelta(seconds=60)  # of one request to a store that answers
_RETRY = 0.2  # seconds between two attempts to connect
_ONE_ATTEMPT = 5.0


_kept: dict[int, TCPStore] = {}  # by port


def keep_store(place: Place, seconds: float) -> None:
    """Listen at the master's port as long as this process lives, on rank 0 where no launcher does.

    Ranks that join a second time may reach it before rank 0 has left the first time.
    """
    if place.master_port in _kept:
        return
    port = place.master_port
    try:
        _kept[port] = _store("localhost", port, seconds, listens=True)
    except TimeoutError:
        raise ClusterError(f"rank 0 cannot listen at port {port}: no answer in {seconds:g} s") from None
    except DistError as error:
        text = str(error)
        if "EADDRINUSE" in text or "already in use" in text:
            raise ClusterError(
                f"port {port} of this host is in use, so rank 0 cannot listen there for the other ranks: end "
                "what uses it, or choose another MASTER_PORT (torchrun: --master-port)"
            ) from error
        raise ClusterError(f"rank 0 cannot listen at port {port}: {first_line(error)}") from error


def reach_store(place: Place, seconds: float, interface: str | None = None) -> Interface:
    """Wait until the master answers; return the interface used. It may start later than this rank."""
    deadline = time.monotonic() + seconds
    while True:
        chosen: Interface | None = None
        try:
            chosen = choose(interface, place.master_address, place.master_port)
            # torch's client would wait too, but it prints to stderr again and again, without a reason.
            patience = max(0.1, min(_ONE_ATTEMPT, deadline - time.monotonic()))
            socket.create_connection((place.master_address, place.master_port), patience).close()
            return chosen
        except OSError as error:
            if time.monotonic() + _RETRY > deadline:
                raise _unreachable(place, seconds, chosen, str(error)) from error
        time.sleep(_RETRY)


def connect(place: Place, seconds: float, interface: Interface) -> TCPStore:
    """Open a connection to the store. A connection serves one thread: a request can block it."""
    try:
        return _store(place.master_address, place.master_port, seconds, listens=False)
    except (TimeoutError, DistError) as error:
        reason = first_line(error) or "something listens there, but it does not answer as torch's store does"
        raise _unreachable(place, seconds, interface, reason) from error


def _store(host: str, port: int, seconds: float, listens: bool) -> TCPStore:
    def make() -> TCPStore:
        store = TCPStore(
            host,
            port,
            is_master=listens,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=listens,  # a group that the user made at the same port shares it
        )
        store.set_timeout(_OPERATION)
        return store

    return within(seconds, make)


def _unreachable(place: Place, seconds: float, chosen: Interface | None, reason: str) -> ClusterError:
    way = f"over interface {chosen.name}, local address {chosen.address}" if chosen else "no route to it"
    keeper = (
        "the launcher (torchrun on the first host) listens there"
        if place.launcher_keeps_store
        else "rank 0 listens there once it has started"
    )
    return ClusterError(
        f"rank {place.rank} cannot reach the master at {place.master} ({way}): {reason}; tried for "
        f"{seconds:g} s. Check MASTER_ADDR and MASTER_PORT ({keeper}) and firewalls between the hosts"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return next(iter(str(error).strip().splitlines()), "")
