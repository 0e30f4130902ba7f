"""How many processor cores this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return how many cores this process may run on; a container may allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
