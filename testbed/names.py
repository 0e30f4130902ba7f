"""Names of namespaces: which belong together, who owns them, which are left over from a dead owner.

A network's name is ``rhtb-PID-START-SERIAL``: the process that made it, when that process started (a
number may come back as another process), and a count within the process. A network that was left up for
a person has no owner: ``rhtb-kept-NAME``. Its namespaces are ``<network>-switch`` and ``<network>-r3``.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from testbed.errors import TestbedError

PREFIX = "rhtb"
NAMESPACES = Path("/var/run/netns")

_NAMESPACE = re.compile(rf"({PREFIX}-(?:(\d+)-(\d+)-\d+|kept-[a-z0-9]+))-(?:switch|r\d+)")
_serial = itertools.count()


def new_name() -> str:
    """A name for a network that this process owns."""
    return f"{PREFIX}-{os.getpid()}-{_start_of(os.getpid())}-{next(_serial)}"


def kept_name(name: str) -> str:
    """The name of a network that stays until it is taken down."""
    if not re.fullmatch(r"[a-z0-9]{1,32}", name):
        raise TestbedError(f"a network is named by up to 32 small letters and digits; got {name!r}")
    return f"{PREFIX}-kept-{name}"


def is_owned_here(network: str) -> bool:
    """Whether this very process made the network."""
    return network.startswith(f"{PREFIX}-{os.getpid()}-{_start_of(os.getpid())}-")


def switch_of(network: str) -> str:
    """The namespace of a network's bridges."""
    return f"{network}-switch"


def rank_of(network: str, rank: int) -> str:
    """The namespace of a rank."""
    return f"{network}-r{rank}"


def networks() -> dict[str, list[str]]:
    """Namespaces of every testbed network on this machine."""
    found: dict[str, list[str]] = {}
    names = sorted(os.listdir(NAMESPACES)) if NAMESPACES.is_dir() else []
    for name in names:
        if match := _NAMESPACE.fullmatch(name):
            found.setdefault(match[1], []).append(name)
    return found


def kept_networks() -> list[str]:
    """The names, as people gave them, of the networks that were left up."""
    return [name.removeprefix(f"{PREFIX}-kept-") for name in networks() if name.startswith(f"{PREFIX}-kept-")]


def leftovers() -> list[str]:
    """Networks whose owner is dead."""
    return [network for network, (first, *_) in networks().items() if _owner_is_dead(first)]


def _owner_is_dead(namespace: str) -> bool:
    match = _NAMESPACE.fullmatch(namespace)
    return match is not None and bool(match[2]) and _start_of(int(match[2])) != match[3]


def _start_of(pid: int) -> str | None:
    """When a process started, in ticks since the machine did; None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    after_name = text.rpartition(")")[2].split()  # the name in brackets may hold anything
    state, start = after_name[0], after_name[19]
    return None if state in "ZX" else start
