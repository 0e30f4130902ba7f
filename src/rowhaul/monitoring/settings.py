"""The settings of monitoring; none of them changes what is learned."""

from __future__ import annotations

from dataclasses import dataclass

from rowhaul._field_types import check_fields
from rowhaul.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class MonitoringConfig:
    """How a run can be watched.

    Args:
        metrics_port: where rank 0 serves /metrics and /healthz; 0 takes a free port, empty serves nothing.
        metrics_address: the address to listen on; 0.0.0.0 is every interface of the machine.
        stalled_after: seconds without progress after which /healthz reports a problem.
        log_json: whether every rank writes its log as JSON lines.
        log_folder: of these logs; empty: ``logs`` in the folder of the run.
        explain: whether to measure what the links carry and why, and what waits for what.
    """

    metrics_port: str = ""
    metrics_address: str = LOOPBACK
    stalled_after: float = 600.0
    log_json: bool = False
    log_folder: str = ""
    explain: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        port = self.metrics_port.strip()
        if port and not (port.isdecimal() and int(port) <= 65535):
            raise ConfigError(
                f"monitoring.metrics_port must be a port from 1 to 65535, or 0 for a free one; got {port!r}"
            )
        if not self.metrics_address.strip():
            raise ConfigError(
                f"monitoring.metrics_address is empty; give {LOOPBACK}, this machine alone, or 0.0.0.0, all"
            )
        if not self.stalled_after > 0:
            raise ConfigError(
                f"monitoring.stalled_after must be more than 0 seconds, got {self.stalled_after!r}"
            )

    @property
    def port(self) -> int | None:
        """The port to serve on; None: serve nothing."""
        return int(self.metrics_port) if self.metrics_port.strip() else None


UNMONITORED = MonitoringConfig()
