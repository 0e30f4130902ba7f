"""Which worker trains which sample: the dispatchers, by name.

A new dispatcher is one file here, a frozen dataclass whose fields are its settings, and one line in the
registry.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, cast

from rowhaul.errors import ConfigError
from rowhaul.schedule.dispatch.parse import from_text, to_text
from rowhaul.schedule.dispatch.task import Dispatcher, DispatchTask
from rowhaul.schedule.dispatch.two_batches import TwoBatches

__all__ = ["DISPATCHERS", "DispatchTask", "Dispatcher", "make_dispatcher", "text_of", "with_settings"]

# Module and class of each: only the one that is asked for is imported.
_REGISTRY = {
    "random": "random:Random",
    "round-robin": "round_robin:RoundRobin",
    "laia": "laia:Laia",
    "laia-adaptive": "adaptive:LaiaAdaptive",
    "esd": "esd:Esd",
    "joint": "joint:Joint",
    "brute-force": "brute_force:BruteForce",
}
DISPATCHERS = (*_REGISTRY, TwoBatches.name)


def make_dispatcher(text: str) -> Dispatcher:
    """The dispatcher that a text names: ``name[:value...][:key=value...]``, or ``two-batch:`` and another.

    Examples: ``random``, ``laia:threads=4``, ``laia-adaptive:8``, ``esd:0.5``, ``esd:1:min3-min``,
    ``joint:auto``, ``two-batch:laia``.
    """
    name, _, settings = text.partition(":")
    if name == TwoBatches.name:
        return TwoBatches(make_dispatcher(settings))
    if name not in _REGISTRY:
        raise ConfigError(f"unknown dispatcher {name!r}; known are {', '.join(DISPATCHERS)}")
    dispatcher: Dispatcher = from_text(_kind(name), name, settings)
    return dispatcher


def text_of(dispatcher: Dispatcher) -> str | None:
    """The text of which `make_dispatcher` makes an equal one, unlearnt; None for an unregistered one."""
    if isinstance(dispatcher, TwoBatches):
        inner = text_of(dispatcher.inner)
        return None if inner is None else f"{dispatcher.name}:{inner}"
    known = dispatcher.name in _REGISTRY and type(dispatcher) is _kind(dispatcher.name)
    return to_text(dispatcher) if known else None


def with_settings(dispatcher: Dispatcher, **settings: Any) -> Dispatcher:
    """The dispatcher with some settings changed; a wrapper passes them to the one it wraps."""
    if isinstance(dispatcher, TwoBatches):
        return replace(dispatcher, inner=with_settings(dispatcher.inner, **settings))
    for name in settings:
        if not hasattr(dispatcher, name):
            raise ConfigError(f"{dispatcher.name} has no setting {name}")
    changed: Dispatcher = replace(cast(Any, dispatcher), **settings)
    return changed


def _kind(name: str) -> type:
    module, kind = _REGISTRY[name].split(":")
    found: type = getattr(import_module(f"{__name__}.{module}"), kind)
    return found
