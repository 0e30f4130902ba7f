"""Rank 0 announces its rendezvous store where another one is at the master's address, open to anyone.

That is torchrun's, which its agent hosts, or that of the user's ``torch.distributed``. It serves only to find
ours: nothing in it is secret, and nothing counts that is not signed with the run's secret.
"""

from __future__ import annotations

import hmac
import json
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]  # compiled

from rowhaul.cluster.interface import Interface, choose
from rowhaul.cluster.place import Place, address_text
from rowhaul.cluster.waiting import within
from rowhaul.errors import ClusterError, SecretError

_OPERATION = timedelta(seconds=60)  # of one request to a store that answers
_RETRY = 0.1  # seconds between two attempts to connect
_ONE_ATTEMPT = 5.0
_KEY = "rowhaul/store"


class NotAnnouncedError(Exception):
    """Rank 0 has not announced its store yet."""


class NotSignedError(SecretError):
    """What is announced was not signed with this rank's secret."""


@dataclass(frozen=True)
class StoreAddress:
    """Where the rendezvous store listens: at one port of one or several addresses of a host."""

    hosts: tuple[str, ...]
    port: int

    @property
    def name(self) -> str:
        """The address in messages."""
        return address_text(self.hosts[0], self.port)


def open_board(place: Place, seconds: float, interface: str | None) -> Store | None:
    """Return the store in which rank 0 announces ours; None if ours is at the master's address."""
    if place.launcher_keeps_store:
        return None
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()  # there is no public way to it
    return _connect_to_agent(place, seconds, interface) if place.agent_keeps_store else None


def announce(board: Store, address: StoreAddress, secret: bytes | None) -> None:
    """Announce rank 0's store in another one."""
    text = json.dumps({"hosts": address.hosts, "port": address.port})
    board.set(_KEY, json.dumps({"at": text, "signature": _signature(text, secret)}))


def read_announcement(board: Store, secret: bytes | None) -> StoreAddress:
    """Return what rank 0 has announced. Anyone can write there: nothing counts that is not signed."""
    if not board.check([_KEY]):
        raise NotAnnouncedError("rank 0 has not announced its rendezvous store: has it started?")
    try:
        announcement = json.loads(board.get(_KEY))
        text, signature = str(announcement["at"]), str(announcement["signature"])
        if not hmac.compare_digest(signature.encode(), _signature(text, secret).encode()):
            raise NotSignedError(_disagreement(secret, signed=bool(signature)))
        at = json.loads(text)
        return StoreAddress(tuple(map(str, at["hosts"])), int(at["port"]))
    except NotSignedError:
        raise
    except (ValueError, TypeError, KeyError):
        raise NotAnnouncedError("torchrun's store holds garbage where rank 0 announces its own") from None


def _disagreement(secret: bytes | None, signed: bool) -> str:
    advice = "give every rank the same --secret-file or ROWHAUL_SECRET"
    if secret is None:
        return f"rank 0 has a secret and this rank has none: {advice}"
    problem = "was signed with another secret" if signed else "is not signed: rank 0 has no secret"
    return f"the announcement of rank 0's store {problem}; {advice}"


def _signature(text: str, secret: bytes | None) -> str:
    if secret is None:
        return ""
    return hmac.digest(secret, b"rowhaul store announcement 1 " + text.encode(), "sha256").hex()


def _connect_to_agent(place: Place, seconds: float, interface: str | None) -> Store:
    """Connect to torchrun's store, once it answers."""
    deadline = time.monotonic() + seconds
    while True:
        chosen: Interface | None = None
        try:
            chosen = choose(interface, place.master_address, place.master_port)
            # torch's client would wait too, but it prints to stderr again and again, without a reason.
            patience = max(0.1, min(_ONE_ATTEMPT, deadline - time.monotonic()))
            socket.create_connection((place.master_address, place.master_port), patience).close()
            break
        except OSError as error:
            if time.monotonic() + _RETRY > deadline:
                raise unreachable(place, seconds, chosen, str(error)) from error
        time.sleep(_RETRY)
    limit, at = timedelta(seconds=seconds), (place.master_address, place.master_port)
    try:
        board = within(seconds, lambda: TCPStore(*at, timeout=limit, wait_for_workers=False))
        board.set_timeout(_OPERATION)
        return board
    except (TimeoutError, DistError) as error:
        reason = first_line(error) or "something listens there, but it does not answer as torch's store does"
        raise unreachable(place, seconds, chosen, reason) from error


def unreachable(
    place: Place, seconds: float, chosen: Interface | None, reason: str, address: StoreAddress | None = None
) -> ClusterError:
    """Return the error of a rank that does not reach the master: what was tried, and what to check."""
    way = f"over interface {chosen.name}, local address {chosen.address}" if chosen else "no route to it"
    if place.launcher_keeps_store:
        keeper = "the launcher listens there"
    elif place.agent_keeps_store:
        keeper = "torchrun on the first host listens there"
    else:
        keeper = "rank 0 listens there once it has started"
    beyond = ""
    if address is not None and address.port != place.master_port:
        beyond = f"; rank 0's store is at {address.name}"
    return ClusterError(
        f"rank {place.rank} cannot reach the master at {place.master} ({way}): {reason}; tried for "
        f"{seconds:g} s. Check MASTER_ADDR and MASTER_PORT ({keeper}{beyond}) and firewalls between the hosts"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return next(iter(str(error).strip().splitlines()), "")
