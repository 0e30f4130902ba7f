"""Serving over HTTP until a signal ends it, in one process or in several that share a port and the rows."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

import uvicorn
from prometheus_client.multiprocess import mark_process_dead

from rowhaul.errors import ConfigError
from rowhaul.serve.app import make_app
from rowhaul.serve.connections import Dealer, DealtConnections
from rowhaul.serve.scorer import Scorer
from rowhaul.serve.settings import METRICS_FOLDER, ServeSettings

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_IDLE_SECONDS = 75  # that a connection is kept: longer than load balancers keep theirs
_POLL_SECONDS = 0.5  # between two checks of whether to end
_SHORT_SECONDS = 10.0  # a process that ends by itself sooner would only end again


def bind(settings: ServeSettings) -> socket.socket:
    """Open the port.

    Raises:
        ConfigError: it cannot be had.
    """
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        # With its protocol: without, asyncio leaves Nagle's algorithm on, and an answer waits for 40 ms until
        # the client has acknowledged its header.
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
        bound.listen(_BACKLOG)
    except socket.gaierror:
        raise ConfigError(
            f"{settings.host!r} is no address of this machine; give --host another one"
        ) from None
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror}"
        raise ConfigError(f"port {settings.port} of {settings.host} {why}; give --port another one") from None
    return bound


def url_of(bound: socket.socket) -> str:
    """Return where a bound port is reached."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(settings: ServeSettings, bound: socket.socket) -> None:
    """Serve on a bound port until SIGTERM or SIGINT; running requests are finished.

    Several processes count together where PROMETHEUS_MULTIPROC_DIR names a folder.
    """
    if settings.workers == 1:
        _Server(_prepared(settings)).run(sockets=[bound])
    else:
        _Processes(settings, bound).run()


def _prepared(settings: ServeSettings) -> uvicorn.Config:
    """Open the folder, compile what scoring needs, and return what a server runs."""
    scorer = Scorer(settings.folder, backend=settings.backend, on_unknown=settings.on_unknown)
    if scorer.dense.kind == "pt2":
        import torch

        torch.set_num_threads(1)  # requests are what is spread over threads
    scorer.warm_up()
    return uvicorn.Config(
        make_app(scorer, settings),
        log_config=None,
        access_log=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )


def _serve_as_child(settings: ServeSettings, channel: socket.socket) -> None:
    """Serve until told to stop, or until the parent is gone: nobody would deal connections then."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _DealtServer(_prepared(settings), channel).run(sockets=[])


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


class _Server(uvicorn.Server):
    """A server that ends as a program does that has done what it was told: uvicorn's dies by the signal."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second Ctrl-C does not wait for running requests."""
        super().handle_exit(sig, frame)
        self._captured_signals.clear()


class _DealtServer(_Server):
    """A server without a port, which is dealt its connections."""

    def __init__(self, config: uvicorn.Config, channel: socket.socket) -> None:
        super().__init__(config)
        self._channel = channel

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and take connections."""
        await super().startup(sockets)
        self._connections = DealtConnections(self._channel, self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more, and finish running requests."""
        self._connections.close()
        await super().shutdown(sockets)


class _Processes:
    """Processes on one port; one that dies is replaced.

    The port is open all the time, so requests go to the processes that are left. A process that ends by
    itself right after its start, with a message, ends the server: it would do so again.
    """

    def __init__(self, settings: ServeSettings, bound: socket.socket) -> None:
        self._settings, self._dealer = settings, Dealer(bound)
        self._context = multiprocessing.get_context("spawn")
        self._began: dict[SpawnProcess, float] = {}
        self._is_stopping = False

    def run(self) -> None:
        """Start all, replace those that die, and end them when told to."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for _ in range(self._settings.workers):
                self._start()
            while not self._is_stopping:
                self._dealer.deal([one.sentinel for one in self._began], _POLL_SECONDS)
                self._replace_dead()
        finally:
            self._dealer.close()
            for one in self._began:
                one.terminate()
            for one in self._began:
                one.join(self._settings.shutdown_seconds + 5)
                one.kill()
                one.join()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: Any) -> None:
        self._is_stopping = True

    def _start(self) -> None:
        with self._dealer.channel() as channel:  # the process has its own copy
            process = self._context.Process(target=_serve_as_child, args=(self._settings, channel))
            process.start()
        self._began[process] = time.monotonic()

    def _replace_dead(self) -> None:
        for process in [one for one in self._began if not one.is_alive()]:
            lived = time.monotonic() - self._began.pop(process)
            if self._is_stopping:
                return
            if METRICS_FOLDER in os.environ and process.pid is not None:
                mark_process_dead(process.pid)  # type: ignore[no-untyped-call]  # it has no types
            was_killed = process.exitcode is not None and process.exitcode < 0
            if lived < _SHORT_SECONDS and not was_killed:
                raise ConfigError(
                    f"a server process ended after {lived:.1f} s with exit code {process.exitcode}; see its "
                    "message above"
                )
            _log.warning("server process %s ended with exit code %s; replaced", process.pid, process.exitcode)
            self._start()
