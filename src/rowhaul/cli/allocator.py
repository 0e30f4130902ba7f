"""Keeping freed memory: on Linux, glibc gives large blocks back and every step faults them in again.

A training step frees and allocates the same few large tensors over and over. By default glibc maps
each afresh, and the page faults can cost as much as the arithmetic. Only programs of ours change the
allocator; importing the library never does.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from malloc.h
_LARGE = 1 << 30


def keep_freed_memory() -> bool:
    """Ask the allocator to keep what is freed; says whether there was one that listens."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE) and mallopt(_TRIM_THRESHOLD, _LARGE))
