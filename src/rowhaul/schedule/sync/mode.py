"""The synchronisation modes by name."""

from __future__ import annotations

from dataclasses import dataclass

from rowhaul.errors import ConfigError

NAMES = ("on-demand", "full", "bounded:S", "static")


@dataclass(frozen=True)
class SyncMode:
    """When a trained row goes home.

    ``on-demand``: when another worker needs it or a cache has no room for it. ``full``: at once.
    ``bounded``: when more than ``staleness`` updates wait; readers tolerate as many (inexact).
    ``static``: replicated rows are all-reduced, all others pulled and pushed in every iteration.
    """

    name: str
    staleness: int = 0

    @property
    def caches_rows(self) -> bool:
        """Whether rows stay on workers between iterations."""
        return self.name != "static"


def make_sync(text: str) -> SyncMode:
    """The mode of a name such as ``"on-demand"`` or ``"bounded:2"``."""
    name, _, value = text.partition(":")
    if name == "bounded" and value.isdecimal():
        return SyncMode(name, int(value))
    if name in ("on-demand", "full", "static") and not value:
        return SyncMode(name)
    if name == "bounded":
        raise ConfigError(f"bounded staleness is 'bounded:S' with S = 0, 1, 2, ... updates; got {text!r}")
    raise ConfigError(f"there is no synchronisation {text!r}; known are {', '.join(NAMES)}")
