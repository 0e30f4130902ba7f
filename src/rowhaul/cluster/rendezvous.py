"""Where ranks meet: rank 0 hosts the rendezvous store, or our launcher does, and all ranks connect to it.

Without an agent, the store is at the master's address and port. Under torchrun a store of its agent is there,
open to anyone: rank 0 hosts ours at another port and only announces that port in the agent's store, signed
with the run's secret. The same holds where the user has initialised ``torch.distributed``.

The store is reached before anything else, so most problems with an address, a port or a firewall show here;
errors say what was tried.
"""

from __future__ import annotations

import atexit
import errno
import logging
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # compiled

from rowhaul._proof import BrokenProofError
from rowhaul.cluster.announcement import (
    NotAnnouncedError,
    NotSignedError,
    StoreAddress,
    announce,
    first_line,
    open_board,
    read_announcement,
    unreachable,
)
from rowhaul.cluster.interface import Interface, choose, is_loopback, listening_addresses
from rowhaul.cluster.place import Place, address_text
from rowhaul.cluster.store_client import PrefixStore, StoreClient
from rowhaul.cluster.store_server import StoreServer, backlog
from rowhaul.errors import ClusterError, SecretError

__all__ = [
    "PrefixStore",
    "Store",
    "StoreAddress",
    "connect",
    "first_line",
    "host_store",
    "hosted_ports",
    "reach_store",
]

_OPERATION = timedelta(seconds=60)  # of one request to a store that answers
_RETRY = 0.1  # seconds between two attempts to connect
_ONE_ATTEMPT = 5.0

_log = logging.getLogger(__name__)
_kept: dict[tuple[int, bytes | None], StoreServer] = {}  # by port (0: announced) and secret


def host_store(place: Place, secret: bytes | None, seconds: float, interface: str | None = None) -> None:
    """Host the store as long as this process lives, on rank 0 where no launcher does.

    Ranks that join a second time may reach it before rank 0 has left the first time.
    """
    board = open_board(place, seconds, interface)
    port = place.master_port if board is None else 0
    if (port, secret) not in _kept:
        _stop_hosting(port)  # with another secret
        addresses = listening_addresses(interface, place.master_address, place.master_port, place.is_one_host)
        server = StoreServer(_listeners(addresses, port, backlog(place.world_size)), secret)
        _kept[port, secret] = server
        atexit.register(server.close)  # no thread may hold the lock of stderr while the interpreter ends
        where = ", ".join(address_text(host, server.port) for host in server.addresses)
        _log.info("rank 0 hosts the rendezvous store at %s", where)
    if board is not None:
        server = _kept[port, secret]
        hosts = sorted(server.addresses, key=is_loopback)
        announce(board, StoreAddress(tuple(hosts), server.port), secret)


def hosted_ports() -> set[int]:
    """Return the ports at which this process hosts rendezvous stores."""
    return {server.port for server in _kept.values()}


def reach_store(
    place: Place, secret: bytes | None, seconds: float, interface: str | None = None
) -> tuple[StoreClient, StoreAddress, Interface]:
    """Connect once the store answers: it may start later than this rank. Return the interface used, too."""
    deadline = time.monotonic() + seconds
    board = open_board(place, seconds, interface)
    address = StoreAddress((place.master_address,), place.master_port) if board is None else None
    while True:
        chosen: Interface | None = None
        try:
            chosen = choose(interface, place.master_address, place.master_port)
            if board is not None:
                address = read_announcement(board, secret)
            assert address is not None
            return _attempt(address, secret, deadline - time.monotonic()), address, chosen
        except (OSError, BrokenProofError, NotAnnouncedError) as error:
            if time.monotonic() + _RETRY > deadline:
                raise unreachable(place, seconds, chosen, str(error), address) from error
        except SecretError as error:
            # An announcement may be left from an earlier run.
            if not isinstance(error, NotSignedError) or time.monotonic() + _RETRY > deadline:
                raise SecretError(f"rank {place.rank} cannot join: {error}") from None
        time.sleep(_RETRY)


def connect(address: StoreAddress, secret: bytes | None, seconds: float) -> StoreClient:
    """Open a connection to the store. A connection serves one thread: a request can block it.

    A store that is busy, for instance with strangers, is tried again until ``seconds`` have passed.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _attempt(address, secret, deadline - time.monotonic())
        except (TimeoutError, BrokenProofError):
            if time.monotonic() + _RETRY > deadline:
                raise
        time.sleep(_RETRY)


def _attempt(address: StoreAddress, secret: bytes | None, seconds: float) -> StoreClient:
    """Try each of the store's addresses once."""
    patience = max(0.1, min(_ONE_ATTEMPT, seconds))
    error: OSError | BrokenProofError | None = None
    for host in address.hosts:
        try:
            connection = socket.create_connection((host, address.port), patience)
        except OSError as failed:
            error = error or failed  # the first address is the most likely one
            continue
        try:
            store = StoreClient(connection, secret, patience)
        except BaseException as failed:
            connection.close()
            if not isinstance(failed, BrokenProofError):
                raise
            error = failed
            continue
        store.set_timeout(_OPERATION)
        return store
    assert error is not None
    raise error


def _listeners(addresses: Sequence[str], port: int, backlog: int) -> list[socket.socket]:
    """Listen at one port of several addresses."""
    found: list[socket.socket] = []
    problems: list[OSError] = []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        at = found[0].getsockname()[1] if found else port
        try:
            found.append(socket.create_server((address, at), family=family, backlog=backlog))
        except OSError as error:
            problems.append(error)
            if error.errno == errno.EADDRINUSE:
                break
    in_use = any(error.errno == errno.EADDRINUSE for error in problems)
    if found and not in_use:  # an address that is none, such as ::1 without IPv6, is not needed
        return found
    for listener in found:
        listener.close()
    where = f"port {port}" if port else "a free port"
    if in_use:
        raise ClusterError(
            f"{where} of this host is in use, so rank 0 cannot listen there for the other ranks: end "
            "what uses it, or choose another MASTER_PORT (torchrun: --master-port)"
        ) from problems[-1]
    raise ClusterError(
        f"rank 0 cannot listen at {where} of {', '.join(addresses)}: {problems[0].strerror}"
    ) from problems[0]


def _stop_hosting(port: int) -> None:
    for key in [key for key in _kept if key[0] == port and port]:
        _kept.pop(key).close()
