"""How scores are served over HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from rowhaul._cores import usable_cores
from rowhaul.errors import ConfigError

LOOPBACK = "127.0.0.1"
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # variable: where several processes count together


@dataclass(frozen=True)
class ServeSettings:
    """Where to listen, how much one process does at once, what a request may ask for.

    Args:
        folder: what `rowhaul export --dense` wrote.
        host: address to listen on; 0.0.0.0 is every interface of the machine.
        port: 0 takes a free one.
        workers: processes; they share the memory of the rows.
        threads: that score in each process; 0: as many as processors, divided by the processes.
        backend: of the dense part: auto, dots, onnx or pt2.
        on_unknown: what ids never trained read, where that is not what the run says.
        max_candidates: of a request.
        max_body_bytes: of a request.
        max_waiting: requests at once in a process, waiting ones included; more are turned away. Those that
            are still arriving are held to as many bytes as these may have.
        timeout_seconds: for a request to arrive and, once more, to be scored.
        refresh_seconds: between two looks for what training has published; 0: never.
        shutdown_seconds: that running requests have to finish in, once told to stop.
        page: also show how fresh, good and fast it is, at /page.
    """

    folder: str
    host: str = LOOPBACK
    port: int = 8080
    workers: int = 1
    threads: int = 0
    backend: str = "auto"
    on_unknown: str | None = None
    max_candidates: int = 10_000
    max_body_bytes: int = 16 << 20
    max_waiting: int = 128
    timeout_seconds: float = 5.0
    refresh_seconds: float = 1.0
    shutdown_seconds: int = 30
    page: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 1 to 65535, or 0 for a free one, got {self.port}")
        if self.threads < 0:
            raise ConfigError(f"threads must be at least 1, or 0 for as many as fit, got {self.threads}")
        for name in ("workers", "max_candidates", "max_body_bytes", "max_waiting", "shutdown_seconds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.refresh_seconds >= 0:
            raise ConfigError(f"refresh_seconds must be at least 0, got {self.refresh_seconds!r}")
        if not self.timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be more than 0, got {self.timeout_seconds!r}")

    @property
    def num_threads(self) -> int:
        """Threads that score in each process."""
        return self.threads or max(1, usable_cores() // self.workers)
