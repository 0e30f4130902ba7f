"""How often a run is saved or published: by steps or by the clock."""

from __future__ import annotations

from dataclasses import dataclass

from rowhaul._quantities import parse_period
from rowhaul.errors import ConfigError


@dataclass(frozen=True)
class Pace:
    """Either number of 0 says nothing; both of 0: only at the end of the run."""

    steps: int = 0
    seconds: float = 0.0


def pace_of(every: int | str, name: str = "checkpoint_every") -> Pace:
    """Read the setting: a number of steps, a time such as ``15min``, or 0."""
    text = str(every).strip()
    if text.lstrip("+-").isdecimal():
        if int(text) < 0:
            raise ConfigError(f"{name} must be at least 0, got {every!r}")
        return Pace(steps=int(text))
    seconds = parse_period(text, name)
    if not 0 < seconds <= 1e7:
        raise ConfigError(f"{name}: {text!r} must be more than 0s and at most 100d; 0: at the end only")
    return Pace(seconds=seconds)
