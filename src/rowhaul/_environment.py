"""The environment that our programs train in; importing the library never changes it.

* Waiting OpenMP threads sleep. By default they spin on their core for a while after every parallel
  piece of PyTorch, and on a machine with few cores they take it from the threads that move rows.
  OpenMP reads this when PyTorch is loaded, so it is set here, before that.
* Freed memory is kept. A step frees and allocates the same few large tensors over and over. By
  default glibc maps each afresh, and the page faults can cost as much as the arithmetic.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from malloc.h
_LARGE = 1 << 30


def set_up() -> None:
    """Set what a user has not set; call it before PyTorch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.platform.startswith("linux") and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent where libc is not glibc
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, _LARGE)
            mallopt(_TRIM_THRESHOLD, _LARGE)
