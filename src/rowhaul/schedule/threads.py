"""Threads that plan together: each takes the next chunk of rows, features or workers when it is free.

A plan is the same for any number of threads. Every chunk writes to places of its own, which are known before
the first of them begins; nothing depends on which thread handled it, or when.

Work that goes step by step, each step needing the one before, is led by one thread (`Threads.lead`): it opens
a step of several parts on a board, takes parts itself as all others do, and goes on when all are done.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import register_jitable

from rowhaul._atomic import compare_exchange, fetch_add, load_acquire, store_release
from rowhaul._kernels import kernel
from rowhaul._memory import data_address
from rowhaul.errors import ConfigError

CHUNK_ROWS = 2048  # rows that a thread takes at a time
MOST_THREADS = 64

Counter = npt.NDArray[np.int64]  # one number: the next chunk
# The open step: its number, the next part and how many it has; and, a line of the cache further, parts done.
Board = npt.NDArray[np.int64]
Result = TypeVar("Result")

NONE_LEFT, CLOSED = -1, -2  # instead of a part
_DONE = 8  # words from one to the other
_MOST_PARTS = 0xFFFF
_NEXT_PART = 16  # bits that the number of parts takes
_NUMBER = 32  # bits that both take
_SPINS = 256  # looks at the board, until the processor is offered to others
_yield = types.ExternalFunction("sched_yield", types.int32())


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

    def lead(
        self, lead: Callable[[Board], Result], assist: Callable[[Board], object], most_parts: int
    ) -> Result:
        """Call a kernel that opens steps on a board; other threads call ``assist``, to take parts of them.

        The leader takes parts, too, so it never waits for a thread that has not started. There are never more
        threads than ``most_parts``, the parts of the largest step.
        """
        board = np.zeros(2 * _DONE, np.int64)
        helpers = []
        try:
            if self._pool is not None:
                for _ in range(min(self.count, most_parts) - 1):
                    helpers.append(self._pool.submit(assist, board))
            return lead(board)
        finally:
            close_board(board)
            for one in helpers:
                if not one.cancel():
                    one.result()


@kernel
def close_board(board):
    """Tell the threads that look for parts to stop."""
    store_release(data_address(board), CLOSED)


@register_jitable
def open_step(board, num_parts):
    """Begin a step, once all parts of the one before are done; everything written so far is seen by all."""
    address = data_address(board)
    number = (load_acquire(address) >> _NUMBER) + 1
    store_release(address + 8 * _DONE, 0)
    store_release(address, number << _NUMBER | num_parts)


@register_jitable
def next_part(board):
    """Take a part of the open step; `NONE_LEFT` if there is none, or `CLOSED`."""
    address = data_address(board)
    while True:
        state = load_acquire(address)
        if state < 0:
            return CLOSED
        part = (state >> _NEXT_PART) & _MOST_PARTS
        if part >= state & _MOST_PARTS:
            return NONE_LEFT
        if compare_exchange(address, state, state + (1 << _NEXT_PART)):
            return part


@register_jitable
def finish_part(board):
    """Report a part as done."""
    fetch_add(data_address(board) + 8 * _DONE, 1)


@register_jitable
def await_parts(board, num_parts):
    """Wait until all parts of the step are done; what they wrote can be read."""
    spins = 0
    while load_acquire(data_address(board) + 8 * _DONE) < num_parts:
        spins = rest(spins)


@register_jitable
def rest(spins):
    """Wait a moment; longer, if there have been many."""
    if spins >= _SPINS:
        _yield()
        return 0
    return spins + 1


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
