"""Process settings that our programs make; importing the library never changes them.

* Waiting OpenMP threads sleep. By default they spin on their core for a while after every parallel
  section of PyTorch, and on a machine with few cores they take it from the threads that move rows.
  OpenMP reads this when PyTorch is loaded, so it is set before that.
* While training, freed memory is kept. A step frees and allocates the same few large tensors over and
  over; by default glibc maps each afresh, and the page faults can cost as much as the arithmetic.
* Garbage is looked for after 10,000 new objects, not 700. Importing what trains makes half a million that all
  stay, and looking through them again and again was a sixth of the start; steps of ours leave no garbage.
* On a rank, Python switches threads sooner: its threads wait for each other.
* While preparing data, freed memory is returned, so that the peak does not creep up with the file.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from malloc.h


def set_passive_waiting() -> None:
    """Make waiting OpenMP threads sleep, unless the user has chosen; call before importing PyTorch."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def collect_garbage_less_often() -> None:
    """Look for garbage after 10,000 new objects; call before importing what is large."""
    gc.set_threshold(10_000)


def keep_freed_memory() -> None:
    """Keep freed memory, for work that allocates the same large blocks again and again."""
    _set_thresholds(1 << 30)


def return_freed_memory() -> None:
    """Return freed memory, for a long stream of large blocks of different sizes."""
    _set_thresholds(1 << 17)


def _set_thresholds(num_bytes: int) -> None:
    if sys.platform.startswith("linux") and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent where libc is not glibc
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, num_bytes)
            mallopt(_TRIM_THRESHOLD, num_bytes)


def switch_threads_sooner() -> None:
    """Release Python's lock after half a millisecond instead of five."""
    sys.setswitchinterval(0.0005)
