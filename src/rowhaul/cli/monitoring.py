"""The options of `rowhaul train` that let a run be watched, and what they start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rowhaul.cli.console import say
from rowhaul.errors import ConfigError
from rowhaul.monitoring.settings import MonitoringConfig

if TYPE_CHECKING:
    from rowhaul.monitoring.monitor import Monitor
    from rowhaul.train import TrainConfig


def _option(name: str, help: str) -> Any:
    return typer.Option(None, name, help=help, rich_help_panel="Monitoring")


METRICS_PORT = _option("--metrics-port", "Serve /metrics (Prometheus) and /healthz here; 0: a free port.")
METRICS_ADDRESS = _option("--metrics-address", "Address to serve on; default 127.0.0.1; 0.0.0.0: all.")
STALLED_AFTER = _option("--stalled-after", "Seconds without progress until /healthz fails; default 600.")
LOG_JSON = _option("--log-json", "Write a log of JSON lines per rank, in logs/ of --out.")
EXPLAIN = _option("--explain", "Show what each link carries and why, what waits, and what would help.")
LOG_FOLDER = _option("--log-folder", "Folder for the logs of JSON lines instead.")


def with_monitoring(
    config: TrainConfig,
    metrics_port: int | None,
    metrics_address: str | None,
    stalled_after: float | None,
    log_json: bool | None,
    log_folder: Path | None,
    explain: bool | None,
) -> TrainConfig:
    """A configuration with the options that were given."""
    given: dict[str, Any] = {
        "metrics_port": None if metrics_port is None else str(metrics_port),
        "metrics_address": metrics_address,
        "stalled_after": stalled_after,
        "log_json": log_json,
        "log_folder": None if log_folder is None else str(log_folder),
        "explain": explain,
    }
    options = {name: value for name, value in given.items() if value is not None}
    settings = replace(config.monitoring, **options)
    for flag, given_one, needed, has in (
        ("--metrics-address", metrics_address, "--metrics-port", settings.port is not None),
        ("--stalled-after", stalled_after, "--metrics-port", settings.port is not None),
        ("--log-folder", log_folder, "--log-json", settings.log_json),
    ):
        if given_one is not None and not has:
            raise ConfigError(f"{flag} does nothing without {needed}: give both, or leave it out")
    return replace(config, monitoring=settings)


def check_monitoring(settings: MonitoringConfig, out: Path | None) -> None:
    """Refuse a port or a folder that cannot be had, before any rank is started."""
    if settings.log_json:
        _log_folder(settings, out)
    if settings.port is not None:
        from rowhaul.monitoring.server import check_port

        check_port(settings)


@contextmanager
def monitored(settings: MonitoringConfig, out: Path | None) -> Iterator[Monitor]:
    """Serve metrics from rank 0 and write logs, as the settings say, until the run has ended."""
    from rowhaul.monitoring.monitor import NO_MONITOR

    rank = int(os.environ.get("RANK", "0"))
    serves = settings.port is not None and rank == 0
    if not serves and not settings.log_json:
        yield NO_MONITOR
        return
    from rowhaul.monitoring.run_monitor import RunMonitor

    monitor = RunMonitor()
    with ExitStack() as stack:
        if serves:
            from rowhaul.monitoring.server import MetricsServer

            server = MetricsServer(settings, monitor)
            stack.callback(server.close)
        if settings.log_json:
            from rowhaul.monitoring.json_log import json_log

            stack.enter_context(json_log(_log_folder(settings, out), rank, lambda: monitor.step))
        if serves:
            stack.enter_context(server)
            say(f"metrics: {server.url}")
        yield monitor
        monitor.finish()


def _log_folder(settings: MonitoringConfig, out: Path | None) -> Path:
    from rowhaul.train.run_folder import LOGS

    if settings.log_folder:
        return Path(settings.log_folder).expanduser()
    if out is None or "://" in str(out) or ":/" in str(out):
        where = "without --out" if out is None else f"for a run in {out}"
        raise ConfigError(f"--log-json {where} needs a folder on this machine: give --log-folder")
    return Path(out) / LOGS
