"""Deleted records rest until nobody can still hold their numbers.

A ticket knows where its rows are, not their keys' fate: were a deleted record handed out again at once, an
old ticket would read and train somebody else's row. So every ticket holds a lease, deletions are dated, and
a record is given back to its arena once all leases from before its deletion have ended.
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

    __slots__ = ("_ended", "date")

    def __init__(self, date: int, ended: deque[int]) -> None:
        self.date = date
        self._ended: deque[int] | None = ended

    def end(self) -> None:
        """Give the right up; any number of times."""
        # May run in the garbage collector, at any moment in any thread: it takes no lock.
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.append(self.date)

    def __del__(self) -> None:
        self.end()


class Leases:
    """Who may still use which deleted records.

    Args:
        release: gives records of a group (by its position) back for new rows.
    """

    def __init__(self, release: Callable[[int, Int64s], None]) -> None:
        self._release = release
        self._lock = threading.Lock()
        self._date = 0  # deletions so far
        self._held: Counter[int] = Counter()  # leases that have not ended, by date
        self._ended: deque[int] = deque()
        self._resting: deque[tuple[int, int, Int64s]] = deque()  # date, group, records

    @property
    def num_resting(self) -> int:
        """Deleted records that are not yet given back."""
        with self._lock:
            return sum(len(records) for _, _, records in self._resting)

    def begin(self) -> Lease:
        """A lease on what is found from now on."""
        with self._lock:
            self._count_ended()
            self._held[self._date] += 1
            return Lease(self._date, self._ended)

    def retire(self, group: int, records: Int64s) -> None:
        """Take note that records were deleted."""
        with self._lock:
            self._date += 1
            self._resting.append((self._date, group, records))
        self.sweep()

    def sweep(self) -> None:
        """Give back what no lease protects any more."""
        if not self._resting:
            return
        free = []
        with self._lock:
            self._count_ended()
            oldest = min(self._held, default=self._date)
            while self._resting and self._resting[0][0] <= oldest:
                free.append(self._resting.popleft())
        for _, group, records in free:
            self._release(group, records)

    def _count_ended(self) -> None:
        while self._ended:
            date = self._ended.popleft()
            self._held[date] -= 1
            if not self._held[date]:
                del self._held[date]

    def deleted_since(self, lease: Lease, group: int) -> Int64s:
        """Records of a group that were deleted after a lease, which is still held, began."""
        if not self._resting:
            return np.empty(0, np.int64)
        with self._lock:
            later = [
                records
                for date, of_group, records in self._resting
                if of_group == group and date > lease.date
            ]
        return np.concatenate(later) if later else np.empty(0, np.int64)
