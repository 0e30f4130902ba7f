"""A lock that many may share or one may have alone.

Reading rows and looking up keys may go on side by side; a step, a deletion or the beginning of a snapshot
must not happen in the middle of one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class SharedLock:
    """Held by any number of sharers or by one thread alone; neither kind may be taken again by its holder.

    Whoever waits to have it alone goes before those who come later to share it, so that a stream of
    readers cannot keep a writer waiting for ever.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_sharers = 0
        self._num_waiting = 0  # to have it alone
        self._is_taken = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock beside other sharers."""
        with self._changed:
            while self._is_taken or self._num_waiting:
                self._changed.wait()
            self._num_sharers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_sharers -= 1
                if not self._num_sharers:
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock while nobody else does."""
        with self._changed:
            self._num_waiting += 1
            try:
                while self._is_taken or self._num_sharers:
                    self._changed.wait()
            except BaseException:
                self._num_waiting -= 1
                self._changed.notify_all()
                raise
            self._num_waiting -= 1
            self._is_taken = True
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()
