"""How often a run is saved: by steps or by the clock."""

from __future__ import annotations

from dataclasses import dataclass

from rowhaul._quantities import parse_period
from rowhaul.errors import ConfigError

_NAME = "checkpoint_every"


@dataclass(frozen=True)
class Pace:
    """Either number of 0 says nothing; both of 0: the run is saved at its end only."""

    steps: int = 0
    seconds: float = 0.0


def pace_of(every: int | str) -> Pace:
    """Read the setting: a number of steps, a time such as ``15min``, or 0."""
    text = str(every).strip()
    if text.lstrip("+-").isdecimal():
        if int(text) < 0:
            raise ConfigError(f"{_NAME} must be at least 0, got {every!r}")
        return Pace(steps=int(text))
    seconds = parse_period(text, _NAME)
    if not 0 < seconds <= 1e7:
        raise ConfigError(f"{_NAME}: {text!r} must be more than 0s and at most 100d; 0 saves at the end only")
    return Pace(seconds=seconds)
