"""Unix sockets between processes of one host, and the host's id."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from rowhaul._proof import BrokenProofError, demand, prove
from rowhaul.errors import SecretError

PROOF_SECONDS = 5.0  # a process that is silent for longer is refused

_RETRY = 0.05  # seconds between two attempts to connect

_PEER = struct.Struct("3i")  # process, user, group
_log = logging.getLogger(__name__)


def host_id() -> str:
    """Return an id that is equal on two ranks if they can share memory through an abstract Unix socket.

    That is one running kernel and, since such sockets belong to it, one network namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return f"{socket.gethostname()}-{uuid.getnode():x}"


def new_address(abstract: bool = sys.platform == "linux") -> str:
    """Make a new address: ``@name``, an abstract socket of this network namespace, or a path."""
    name = f"rowhaul-{secrets.token_hex(8)}"
    return f"@{name}" if abstract else os.path.join(tempfile.gettempdir(), name)


def as_system_address(address: str) -> str:
    """Convert an address to the form of system calls."""
    return "\0" + address[1:] if address.startswith("@") else address


def is_same_user(connection: socket.socket) -> bool:
    """Whether the other end runs as the same user; abstract sockets are open to all."""
    if sys.platform != "linux":
        return True
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(peer)[1] == os.geteuid())


def connect(
    address: str,
    secret: bytes | None,
    purpose: str,
    seconds: float,
    kind: socket.SocketKind = socket.SOCK_STREAM,
) -> socket.socket:
    """Connect to a process of this run, and prove the secret to it.

    A process that was not let run for `PROOF_SECONDS`, on a busy machine, is refused like a silent stranger;
    it tries again, as it does where strangers fill the queue of the listening end.
    """
    deadline = time.monotonic() + seconds
    while True:
        remaining = max(_RETRY, deadline - time.monotonic())
        connection = socket.socket(socket.AF_UNIX, kind)
        try:
            connection.settimeout(remaining)
            connection.connect(as_system_address(address))
            if not is_same_user(connection):
                raise PermissionError("it belongs to another user")
            prove(connection, secret, remaining, purpose)
            return connection
        except (BlockingIOError, BrokenProofError):
            connection.close()
            if time.monotonic() + _RETRY > deadline:
                raise
        except BaseException:
            connection.close()
            raise
        time.sleep(_RETRY)


def lets_in(connection: socket.socket, secret: bytes | None, purpose: str) -> bool:
    """Whether the process that has connected is one of this run; log why not."""
    try:
        if not is_same_user(connection):
            raise SecretError("it belongs to another user")
        demand(connection, secret, PROOF_SECONDS, purpose)
        return True
    except SecretError as error:
        _log.warning("the socket of a %s refused a process: %s", purpose, error)
        return False


def receive_exactly(connection: socket.socket, size: int, check: Callable[[], None]) -> bytes:
    """Receive ``size`` bytes; call ``check`` now and then during the wait."""
    received = b""
    while len(received) < size:
        try:
            part = connection.recv(size - len(received))
        except TimeoutError:
            check()
            continue
        if not part:
            raise EOFError("the connection is closed")
        received += part
    return received
