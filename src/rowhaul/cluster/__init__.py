"""Joins ranks into a cluster: launch, roles, process groups, heartbeat, choice of interface.

``join()`` on every rank returns a `Cluster`; ``launch()`` starts all ranks on this machine. Names are
imported when first used: starting local processes must not load PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rowhaul.cluster.checks import check_same, check_shared_folder, gather_texts, require_all
    from rowhaul.cluster.cluster import Cluster
    from rowhaul.cluster.heartbeat import Heartbeat
    from rowhaul.cluster.joining import Timeouts, join
    from rowhaul.cluster.launcher import launch
    from rowhaul.cluster.place import Place, is_launched

_NAMES = {
    "checks": ("check_same", "check_shared_folder", "gather_texts", "require_all"),
    "cluster": ("Cluster",),
    "heartbeat": ("Heartbeat",),
    "joining": ("Timeouts", "join"),
    "launcher": ("launch",),
    "place": ("Place", "is_launched"),
}

__all__ = [
    "Cluster",
    "Heartbeat",
    "Place",
    "Timeouts",
    "check_same",
    "check_shared_folder",
    "gather_texts",
    "is_launched",
    "join",
    "launch",
    "require_all",
]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"rowhaul.cluster.{module}"), name)
    raise AttributeError(f"module 'rowhaul.cluster' has no attribute {name!r}")
