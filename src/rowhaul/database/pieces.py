"""Large reads and steps, cut into pieces that run side by side: compiled kernels hold no GIL.

Pieces never share a row, so results do not depend on how many threads there are.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_WORTH_A_THREAD = 1 << 20  # bytes of rows; waking a thread takes as long as copying some of them


class Pieces:
    """Runs work on up to ``num_threads`` threads, of which the caller's is one."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool = (
            ThreadPoolExecutor(num_threads - 1, thread_name_prefix="rowhaul-rows")
            if num_threads > 1
            else None
        )

    def run(self, count: int, item_bytes: int, work: Callable[[int, int], object]) -> None:
        """Call ``work(first, last)`` for pieces of ``range(count)`` that cover it."""
        num_pieces = min(self.num_threads, max(1, count * item_bytes // _WORTH_A_THREAD))
        if num_pieces == 1 or self._pool is None:
            work(0, count)
            return
        bounds = [count * piece // num_pieces for piece in range(num_pieces + 1)]
        others = [self._pool.submit(work, bounds[piece], bounds[piece + 1]) for piece in range(1, num_pieces)]
        try:
            work(0, bounds[1])
        finally:  # even if it failed: nobody may still be writing when the caller goes on
            errors = [other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
