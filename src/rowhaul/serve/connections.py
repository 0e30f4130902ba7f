"""Connections of one port for several processes: each goes to the process that has the fewest.

Processes that take connections from a shared port themselves do so very unevenly: the system wakes the same
one first again and again, and clients keep their connections for long.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait

import uvicorn

_READY, _CLOSED, _TAKEN = b"+", b"-", b"c"  # what processes say, and what goes with a connection
_AT_ONCE = 64  # connections that are dealt before anything else is looked at


class Dealer:
    """Deals the connections of a port to processes that take them by `DealtConnections`."""

    def __init__(self, bound: socket.socket) -> None:
        self._bound = bound
        self._starting: list[socket.socket] = []
        self._num_open: dict[socket.socket, int] = {}  # connections of each process that is ready
        bound.setblocking(False)

    def channel(self) -> socket.socket:
        """Return what a new process takes connections from."""
        here, there = socket.socketpair()
        here.setblocking(False)
        self._starting.append(here)
        return there

    def deal(self, sentinels: Sequence[int], seconds: float) -> None:
        """Deal for that long at most, and only until a process ends or anything else has happened."""
        channels = [*self._starting, *self._num_open]
        port = [self._bound] if self._num_open else []  # connections wait until a process is ready
        happened = wait([*sentinels, *channels, *port], seconds)
        for channel in channels:
            if channel in happened:
                self._listen(channel)
        if self._bound in happened:
            self._accept()

    def close(self) -> None:
        """Deal no more."""
        for channel in (*self._starting, *self._num_open):
            channel.close()
        self._starting, self._num_open = [], {}

    def _listen(self, channel: socket.socket) -> None:
        try:
            said = channel.recv(4096)
        except OSError:
            said = b""
        if not said:  # it has ended
            channel.close()
            self._num_open.pop(channel, None)
            self._starting = [one for one in self._starting if one is not channel]
            return
        if said.startswith(_READY):
            self._starting.remove(channel)
            self._num_open[channel] = 0
        self._num_open[channel] -= said.count(_CLOSED)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._bound.accept()
            except OSError:  # there are no more, or the client has left
                return
            with connection:  # the process has its own copy
                self._give(connection)

    def _give(self, connection: socket.socket) -> None:
        for channel in sorted(self._num_open, key=self._num_open.__getitem__):
            try:
                socket.send_fds(channel, [_TAKEN], [connection.fileno()])
            except OSError:  # it has just ended, or has not looked for so long that no more fit
                continue
            self._num_open[channel] += 1
            return


class DealtConnections:
    """The connections that a process is dealt, for a running server of uvicorn."""

    def __init__(self, channel: socket.socket, server: uvicorn.Server) -> None:
        self._channel, self._loop = channel, asyncio.get_running_loop()
        self._make_protocol = _reporting(server, self._ended)
        self._beginning: set[asyncio.Task[None]] = set()
        channel.setblocking(False)
        channel.send(_READY)
        self._loop.add_reader(channel, self._take)

    def close(self) -> None:
        """Take no more."""
        self._loop.remove_reader(self._channel)
        self._channel.close()

    def _take(self) -> None:
        message, files, _, _ = socket.recv_fds(self._channel, 1, 1)
        if not message:  # the dealer is gone
            self._loop.remove_reader(self._channel)
        elif not files:  # no descriptor was left for it: the system has closed it, and the dealer counts it
            self._ended()
        for one in files:
            task = self._loop.create_task(self._begin(socket.socket(fileno=one)))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # the client has left
            connection.close()
            self._ended()

    def _ended(self) -> None:
        with suppress(OSError):  # the dealer is gone, or no more are taken
            self._channel.send(_CLOSED)


def _reporting(server: uvicorn.Server, ended: Callable[[], None]) -> Callable[[], asyncio.Protocol]:
    """Return what makes uvicorn's protocol for a connection; ``ended`` is called when that is closed."""
    config, protocol = server.config, server.config.http_protocol_class

    class Reporting(protocol):  # type: ignore[valid-type, misc]  # which class depends on what is installed
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            ended()

    state = {"server_state": server.server_state, "app_state": server.lifespan.state}
    return partial(Reporting, config=config, **state)
