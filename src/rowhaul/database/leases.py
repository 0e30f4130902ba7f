"""Keep deleted records from being reused while a ticket or a snapshot may still read them.

A ticket knows record numbers, not keys: if a deleted record were reused at once, an old ticket would read and
train another key's row. Every ticket and snapshot therefore holds a lease. Deletions are numbered, and a
record returns to its arena when all leases from before its deletion have ended.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class Lease:
    """The right to use record numbers found from now on; ends with the object, or at `end`."""

    __slots__ = ("_ended", "number")

    def __init__(self, number: int, ended: deque[int]) -> None:
        self.number = number  # of deletions before it
        self._ended: deque[int] | None = ended

    def end(self) -> None:
        """Give up the right; may be called repeatedly."""
        # The garbage collector may call this at any moment in any thread: it takes no lock.
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.append(self.number)

    def __del__(self) -> None:
        self.end()


class Leases:
    """The leases on records, and the deleted records that wait for them.

    Args:
        release: returns records of a group to its arena.
    """

    def __init__(self, release: Callable[[int, Int64s], None]) -> None:
        self._release = release
        self._lock = threading.Lock()
        self._num_deletions = 0
        self._held: Counter[int] = Counter()  # leases that have not ended, by number
        self._ended: deque[int] = deque()
        self._waiting: deque[tuple[int, int, Int64s]] = deque()  # deletion, group, records

    @property
    def num_waiting(self) -> int:
        """Deleted records that cannot be reused yet."""
        with self._lock:
            return sum(len(records) for _, _, records in self._waiting)

    def begin(self) -> Lease:
        """Start a lease on records found from now on."""
        with self._lock:
            self._count_ended()
            self._held[self._num_deletions] += 1
            return Lease(self._num_deletions, self._ended)

    def retire(self, group: int, records: Int64s) -> None:
        """Release records once no lease from before this deletion is held."""
        with self._lock:
            self._num_deletions += 1
            self._waiting.append((self._num_deletions, group, records))
        self.sweep()

    def sweep(self) -> None:
        """Release the records that no lease protects any more."""
        if not self._waiting:
            return
        free = []
        with self._lock:
            self._count_ended()
            oldest = min(self._held, default=self._num_deletions)
            while self._waiting and self._waiting[0][0] <= oldest:
                free.append(self._waiting.popleft())
        for _, group, records in free:
            self._release(group, records)

    def deleted_since(self, lease: Lease, group: int) -> Int64s:
        """Records of a group that were deleted after a lease, which is still held, began."""
        if not self._waiting:
            return np.empty(0, np.int64)
        later = []
        with self._lock:
            for deletion, of, records in reversed(self._waiting):  # an older lease may keep many before them
                if deletion <= lease.number:
                    break
                if of == group:
                    later.append(records)
        return np.concatenate(later) if later else np.empty(0, np.int64)

    def _count_ended(self) -> None:
        while self._ended:
            number = self._ended.popleft()
            self._held[number] -= 1
            if not self._held[number]:
                del self._held[number]
