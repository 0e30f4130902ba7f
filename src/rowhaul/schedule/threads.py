"""Threads that plan together: each takes the next chunk of rows, features or workers when it is free.

A plan is the same for any number of threads. Every chunk writes to places of its own, which are known before
the first of them begins; nothing depends on which thread handled it, or when.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from rowhaul._atomic import fetch_add
from rowhaul._memory import data_address
from rowhaul.errors import ConfigError

CHUNK_ROWS = 2048  # rows that a thread takes at a time
MOST_THREADS = 64

Counter = npt.NDArray[np.int64]  # one number: the next chunk


class Threads:
    """A pool of threads; the caller is one of them."""

    def __init__(self, count: int = 1) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self.use(count)

    def use(self, count: int) -> None:
        """Go on with this many threads."""
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_THREADS:
            raise ConfigError(f"planning takes 1 to {MOST_THREADS} threads; got {count!r}")
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "rowhaul-planning") if count > 1 else None

    def share(self, work: Callable[[Counter], object], num_chunks: int) -> None:
        """Call a kernel in every thread, with a counter from which it takes chunks until none is left.

        A thread that has not begun when the caller finds no chunk left is not waited for: where other
        threads keep the interpreter busy, the caller does most of the work itself.
        """
        counter = np.zeros(1, np.int64)
        helpers = []
        if self._pool is not None:
            for _ in range(min(self.count, num_chunks) - 1):
                helpers.append(self._pool.submit(work, counter))
        try:
            work(counter)
        finally:
            began = [one for one in helpers if not one.cancel()]
        for one in began:
            one.result()


@register_jitable
def take(counter):
    """The next chunk that no thread has taken; beyond the last one, a number that is too large."""
    return fetch_add(data_address(counter), 1)


@register_jitable
def part_of(slot, num_parts):
    """Which of several parts a slot falls into; slots are mixed first, as they are handed out in order."""
    mixed = (np.uint64(slot) * np.uint64(0x9E3779B1)) & np.uint64(0xFFFFFFFF)
    return np.int64((mixed * np.uint64(num_parts)) >> np.uint64(32))


def bounds(total: int, size: int = 0) -> npt.NDArray[np.int64]:
    """Where chunks of ``total`` rows begin, and where the last one ends."""
    edges: npt.NDArray[np.int64] = np.append(np.arange(0, total, size or CHUNK_ROWS), total)
    return edges
