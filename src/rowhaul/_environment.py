"""The environment that our programs run in; importing the library never changes it.

* Waiting OpenMP threads sleep. By default they spin on their core for a while after every parallel
  piece of PyTorch, and on a machine with few cores they take it from the threads that move rows.
  OpenMP reads this when PyTorch is loaded, so it is set before that.
* While training, freed memory is kept. A step frees and allocates the same few large tensors over and
  over; by default glibc maps each afresh, and the page faults can cost as much as the arithmetic.
* On a rank, threads hand Python's lock on sooner: its threads wait for each other.
* While preparing data, freed memory is given back, so that the peak does not creep up with the file.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from malloc.h


def let_waiting_threads_sleep() -> None:
    """Call it before PyTorch is imported; what a user has set stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def keep_freed_memory() -> None:
    """For work that allocates the same large blocks again and again."""
    _set_thresholds(1 << 30)


def return_freed_memory() -> None:
    """For a long stream of large blocks of different sizes."""
    _set_thresholds(1 << 17)


def _set_thresholds(num_bytes: int) -> None:
    if sys.platform.startswith("linux") and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent where libc is not glibc
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, num_bytes)
            mallopt(_TRIM_THRESHOLD, num_bytes)


def let_threads_take_turns() -> None:
    """Hand Python's lock on after half a millisecond instead of five."""
    sys.setswitchinterval(0.0005)
