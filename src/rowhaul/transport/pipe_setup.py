"""Makes pipes between the ranks of a group that are on one host; all its ranks together."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rowhaul.errors import ClusterError, SecretError
from rowhaul.transport.base import Bytes
from rowhaul.transport.local_sockets import as_system_address, connect, host_id, lets_in, new_address
from rowhaul.transport.pipes import Pipe

VARIABLE = "ROWHAUL_SHARED_MEMORY"  # 0: ranks of one host use the network too
CONNECT_SECONDS = 30.0

_HELLO = struct.Struct("<q")  # the rank of the connecting process
_ADDRESS_BYTES = 64
_HOST_BYTES = 16
_PURPOSE = "pipe"  # of the proof


def form_pipes(
    rank: int,
    all_gather: Callable[[Bytes], npt.NDArray[np.uint8]],
    names: list[int],
    host: str | None = None,
    timeout: float | None = None,
    secret: bytes | None = None,
) -> dict[int, Pipe]:
    """Make pipes to the other ranks of this host; all ranks of the group call this together.

    Args:
        rank: of this process in the group.
        all_gather: of the group.
        names: of the group's ranks, for messages.
        host: a name that the ranks of one host share, to separate ranks that could share memory.
        timeout: seconds that a message may take; None: no limit.
        secret: what the other ranks must prove, and this one to them.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        address = ""
        if sys.platform == "linux" and os.environ.get(VARIABLE, "1") != "0":
            address = new_address()
            listener.bind(as_system_address(address))
            listener.listen(len(names))
            listener.settimeout(CONNECT_SECONDS)
        # Processes of different users may not exchange memory.
        neighbours = f"{host or ''} {host_id()} {os.geteuid()}".encode()
        digest = hashlib.blake2b(neighbours, digest_size=_HOST_BYTES).digest()
        mine = digest + address.encode().ljust(_ADDRESS_BYTES, b"\0")
        everyone = all_gather(np.frombuffer(mine, np.uint8))
        hosts = [bytes(one[:_HOST_BYTES]) for one in everyone]
        addresses = [bytes(one[_HOST_BYTES:]).rstrip(b"\0").decode() for one in everyone]
        near = [
            peer
            for peer in range(len(names))
            if peer != rank and hosts[peer] == hosts[rank] and address and addresses[peer]
        ]
        pipes: dict[int, Pipe] = {}
        try:
            for peer in near:
                if peer < rank:
                    pipes[peer] = _connect(addresses[peer], rank, names[peer], timeout, secret)
            while missing := [peer for peer in near if peer > rank and peer not in pipes]:
                _accept(listener, missing, names, pipes, timeout, secret)
        except BaseException:
            for pipe in pipes.values():
                pipe.close()
            raise
        return pipes


def _connect(address: str, rank: int, name: int, timeout: float | None, secret: bytes | None) -> Pipe:
    try:
        connection = connect(address, secret, _PURPOSE, CONNECT_SECONDS, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(CONNECT_SECONDS)
            return _shake_hands(connection, rank, name, timeout)[1]
        except OSError:
            connection.close()
            raise
    except (OSError, SecretError) as error:
        raise ClusterError(
            f"rank {name} is on this host, but its socket {address} cannot be used ({error}); "
            f"set {VARIABLE}=0 on all ranks to use the network"
        ) from error


def _accept(
    listener: socket.socket,
    missing: list[int],
    names: list[int],
    pipes: dict[int, Pipe],
    timeout: float | None,
    secret: bytes | None,
) -> None:
    """Accept one of the missing ranks, or reject a stranger."""
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        raise ClusterError(
            f"ranks {[names[peer] for peer in missing]} of this host did not connect within "
            f"{CONNECT_SECONDS:g} s"
        ) from None
    connection.settimeout(CONNECT_SECONDS)
    if not lets_in(connection, secret, _PURPOSE):
        connection.close()
        return
    try:
        peer, pipe = _shake_hands(connection, -1, -1, timeout)
        if peer not in missing:
            pipe.close()
            raise ConnectionError(f"a process says that it is rank {peer} of the group")
    except OSError as error:
        connection.close()
        raise ClusterError(
            f"one of the ranks {[names[peer] for peer in missing]} of this host was lost "
            f"while connecting ({error})"
        ) from error
    pipe.peer = names[peer]
    pipes[peer] = pipe


def _shake_hands(connection: socket.socket, rank: int, name: int, timeout: float | None) -> tuple[int, Pipe]:
    """Swap event counters; return the rank of the other end, and the pipe."""
    freed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        socket.send_fds(connection, [_HELLO.pack(rank)], [freed])
        hello, descriptors, _, _ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
        if len(hello) < _HELLO.size or not descriptors:
            raise ConnectionResetError("its process has ended, or may open no more files")
    except BaseException:
        os.close(freed)
        raise
    connection.settimeout(None)  # the other end may compute for long
    return _HELLO.unpack(hello)[0], Pipe(connection, name, freed, descriptors[0], timeout)
