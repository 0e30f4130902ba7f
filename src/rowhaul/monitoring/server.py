"""Serves /metrics and /healthz over HTTP, from threads that training never waits for."""

from __future__ import annotations

import errno
import json
import logging
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from rowhaul.errors import ConfigError
from rowhaul.monitoring.collector import RunCollector
from rowhaul.monitoring.health import check_health
from rowhaul.monitoring.run_monitor import RunMonitor
from rowhaul.monitoring.settings import MonitoringConfig

_log = logging.getLogger(__name__)

_MOST_CLIENTS = 16  # served at once; more are turned away
_CLIENT_SECONDS = 5.0  # without a byte from a client, before it is dropped
_POLL_SECONDS = 0.2  # between two checks of whether to end
_PAGES = "/metrics: for Prometheus\n/healthz: 200 while training makes progress, else 503\n"


class MetricsServer:
    """A port that serves a run's numbers while the context is entered; it is bound at once.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(self, settings: MonitoringConfig, monitor: RunMonitor) -> None:
        assert settings.port is not None
        self._server = _bind(settings.metrics_address.strip(), settings.port)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(RunCollector(monitor, lambda: check_health(monitor, settings.stalled_after)))
        ProcessCollector(registry=registry)
        self._server.registry, self._server.monitor = registry, monitor
        self._server.stalled_after = settings.stalled_after
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="rowhaul-metrics", daemon=True
        )

    @property
    def url(self) -> str:
        """Where the metrics are."""
        host, port = self._server.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}/metrics"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def close(self) -> None:
        """Give the port back, without having served."""
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    registry: CollectorRegistry
    monitor: RunMonitor
    stalled_after: float

    def __init__(self, family: int, address: Any) -> None:
        self.address_family = family
        self._places = threading.BoundedSemaphore(_MOST_CLIENTS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without looking up this host's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a client in a thread of its own, or turn it away if there are too many."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note a client that went away; nothing is printed."""
        _log.debug("a client of the metrics port has failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_SECONDS
    server_version, sys_version = "rowhaul", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, kind, encode(self.server.registry))
        elif path == "/healthz":
            health = check_health(self.server.monitor, self.server.stalled_after)
            status = HTTPStatus.OK if health.is_ok else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(status, "application/json", json.dumps(health.to_dict()).encode() + b"\n")
        else:
            status = HTTPStatus.OK if path == "/" else HTTPStatus.NOT_FOUND
            self._answer(status, "text/plain; charset=utf-8", _PAGES.encode())

    do_HEAD = do_GET  # noqa: N815  # the name http.server looks up

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


def check_port(settings: MonitoringConfig) -> None:
    """Refuse a port that cannot be had, before anything else is started."""
    if settings.port is not None:
        _bind(settings.metrics_address.strip(), settings.port).server_close()


def _bind(address: str, port: int) -> _Server:
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return _Server(family, place)
    except OSError as error:
        raise ConfigError(_why_not(address, port, error)) from None


def _why_not(address: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"metrics address {address!r} is no address of this machine; give --metrics-address one that "
            "`ip address` lists, or 0.0.0.0 for all"
        )
    where = f"metrics port {port} of {address}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use; give --metrics-port another one, or 0 for a free one"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{where} is not allowed; give --metrics-port one from 1024 on, or 0 for a free one"
    return f"{where} cannot be opened: {error.strerror or error}"
