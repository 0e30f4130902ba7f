"""What threads share: a lock for many readers or one writer, and a pool for large reads and steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from rowhaul.errors import ConfigError

_MIN_PIECE_BYTES = 1 << 20  # waking a thread takes as long as copying a part of this


class SharedLock:
    """Held by any number of readers or by one writer; not reentrant.

    A waiting writer goes before later readers, so that a stream of readers cannot starve it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_readers = 0
        self._num_waiting = 0  # writers
        self._is_written = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock as one of its readers."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_written and not self._num_waiting)
            self._num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers -= 1
                if not self._num_readers:
                    self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock alone."""
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._is_written and not self._num_readers)
                self._is_written = True
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._is_written = False
                self._changed.notify_all()


class RefusingLock:
    """Held by one thread, which is refused where it would wait for itself.

    Args:
        refusal: what the thread is told.
    """

    def __init__(self, refusal: str) -> None:
        self._lock, self._refusal = threading.Lock(), refusal
        self._holder: int | None = None

    def __enter__(self) -> None:
        own = threading.get_ident()
        if self._holder == own:  # no other thread sets it to this
            raise ConfigError(self._refusal)
        self._lock.acquire()
        self._holder = own

    def __exit__(self, *error: object) -> None:
        self._holder = None
        self._lock.release()  # maybe in another thread, which has closed the holder's generator


class Pieces:
    """Runs large work in pieces on up to ``num_threads`` threads, the caller's included.

    Compiled kernels hold no GIL. Pieces never share a row, so results do not depend on the number of threads.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool = (
            ThreadPoolExecutor(num_threads - 1, thread_name_prefix="rowhaul-rows")
            if num_threads > 1
            else None
        )

    def run(self, count: int, item_bytes: int, work: Callable[[int, int], object]) -> None:
        """Call ``work(first, last)`` for pieces that cover ``range(count)``."""
        num_pieces = min(self.num_threads, max(1, count * item_bytes // _MIN_PIECE_BYTES))
        if num_pieces == 1 or self._pool is None:
            work(0, count)
            return
        bounds = [count * piece // num_pieces for piece in range(num_pieces + 1)]
        others = [self._pool.submit(work, bounds[piece], bounds[piece + 1]) for piece in range(1, num_pieces)]
        try:
            work(0, bounds[1])
        finally:  # even after a failure: no thread may still write when the caller continues
            errors = [other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
