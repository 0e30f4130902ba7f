"""Finds out which ranks really share a host: those that can pass each other memory.

One kernel and one network namespace suggest it. Containers of one host may still differ in their users or be
kept apart by security modules, so the lowest rank of a host passes a file of memory to each of the others. A
rank that cannot read it counts as a host of its own and uses the network.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

from rowhaul.cluster.rendezvous import Store
from rowhaul.cluster.roll_call import Member
from rowhaul.errors import SecretError
from rowhaul.transport.local_sockets import as_system_address, connect, lets_in, new_address

_PURPOSE = "neighbour"  # of the proof
_SECONDS = 10.0

_log = logging.getLogger(__name__)


class NeighbourProbe:
    """Listens for the other ranks of this host, from before the roll call until all have tried.

    Attributes:
        address: of the socket; empty where there are no abstract sockets.
    """

    def __init__(self, secret: bytes | None) -> None:
        self.address = ""
        self._secret = secret
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if sys.platform == "linux":
            self.address = new_address()
            self._listener.bind(as_system_address(self.address))
            self._listener.listen(128)

    def __enter__(self) -> NeighbourProbe:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def confirm(self, store: Store, members: Sequence[Member], rank: int) -> tuple[Member, ...]:
        """Return the members, those that cannot share memory as hosts of their own; all ranks call this.

        Args:
            store: the run's part of the rendezvous store.
            members: all ranks.
            rank: of this process.
        """
        lowest: dict[str, Member] = {}
        for member in members:
            lowest.setdefault(member.host, member)
        tried = [one for one in members if one.probe and lowest[one.host] is not one]
        me = members[rank]
        first = lowest[me.host]
        if any(lowest[one.host] is me for one in tried):
            threading.Thread(target=self._serve, args=(me.id,), name="rowhaul-probe", daemon=True).start()
        if me in tried:
            reason = _cannot_share(first, self._secret)
            if reason:
                _log.warning(
                    "rank %d uses the network to rank %d of the same host: %s", rank, first.rank, reason
                )
            store.set(_key(rank), reason)
        if not tried:
            return tuple(members)
        reasons = store.multi_get([_key(one.rank) for one in tried])
        apart = {one.rank for one, reason in zip(tried, reasons, strict=True) if reason}
        return tuple(
            replace(one, host=f"{one.host}/rank {one.rank}") if one.rank in apart else one for one in members
        )

    def _serve(self, text: str) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed: all have tried
                return
            with connection:
                if not lets_in(connection, self._secret, _PURPOSE):
                    continue
                file = os.memfd_create("rowhaul-probe", os.MFD_CLOEXEC)
                with contextlib.suppress(OSError):  # it has left; it says so itself
                    os.write(file, text.encode())
                    socket.send_fds(connection, [b"m"], [file])
                os.close(file)


def _cannot_share(first: Member, secret: bytes | None) -> str:
    """Return why memory of a rank of this host cannot be read; empty if it can."""
    try:
        with connect(first.probe, secret, _PURPOSE, _SECONDS) as connection:
            connection.settimeout(_SECONDS)
            _, files, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if not files:
            return "it passed no file"
        try:
            with mmap.mmap(files[0], len(first.id), prot=mmap.PROT_READ) as memory:
                return "" if bytes(memory) == first.id.encode() else "it passed other memory"
        finally:
            for file in files:
                os.close(file)
    except (OSError, ValueError, SecretError) as error:
        return str(error) or type(error).__name__


def _key(rank: int) -> str:
    return f"neighbour/{rank}"
