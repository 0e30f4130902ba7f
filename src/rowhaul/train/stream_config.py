"""The settings of a run that learns from a stream."""

from __future__ import annotations

from dataclasses import dataclass

from rowhaul._field_types import check_fields
from rowhaul._quantities import parse_period
from rowhaul.errors import ConfigError


@dataclass(frozen=True)
class StreamConfig:
    """How a stream is read.

    Args:
        follow: whether the data is a folder in which files appear; standard input and Redis need no saying.
        max_wait: cut a batch when its first sample has waited so long, such as ``5s``; empty: wait until it
            is full, so that a replay learns the same bits.
        stop_when_idle: end the run when nothing has come for so long; empty: go on until stopped.
    """

    follow: bool = False
    max_wait: str = ""
    stop_when_idle: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("max_wait", "stop_when_idle"):
            if getattr(self, name) and not self._seconds(name):
                raise ConfigError(f"stream.{name} must be more than 0s, got {getattr(self, name)!r}")

    def _seconds(self, name: str) -> float:
        given = getattr(self, name)
        return parse_period(given, f"stream.{name}") if given else 0.0

    @property
    def max_wait_seconds(self) -> float:
        """``max_wait``; 0: not given."""
        return self._seconds("max_wait")

    @property
    def idle_seconds(self) -> float:
        """``stop_when_idle``; 0: not given."""
        return self._seconds("stop_when_idle")


NO_STREAM = StreamConfig()
