"""Where the copies of all workers live: one growable array, so that memory follows what is cached.

A row that the directory knows has a *slot*; a *copy* is one worker's cached copy of it. The copies
of a slot form a list that starts at ``head[slot]``, which lies in the directory's record of the
row. Copies that are free wait on a stack.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.growing import extended, extended_stack

COPY = np.dtype(
    [
        ("slot", np.int32),
        ("next", np.int32),  # another copy of the same slot, or -1
        ("worker", np.int32),
        ("last_use", np.int32),  # the iteration in which its worker trained the row last
    ]
)


class CopyPool:
    """The copies of all workers' caches, found by slot.

    Arrays are replaced when they grow: fetch them anew after every step of the caches.
    """

    def __init__(self) -> None:
        self.head = np.zeros(0, np.int32)  # slots: the first copy of each, or -1
        self.copies = np.zeros(0, COPY)  # those in use and those that are free
        self.free = np.zeros(0, np.int32)  # a stack with room for all copies
        self.num_free = 0

    def __len__(self) -> int:
        return len(self.free)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the pool's own arrays, in use or not."""
        return self.copies.nbytes + self.free.nbytes

    def reserve(self, num_copies: int) -> None:
        """Have at least so many copies free."""
        short = num_copies - self.num_free
        if short <= 0:
            return
        old = len(self)
        new = old + max(short, old // 2)
        self.copies = extended(self.copies, new)
        self.free = extended_stack(self.free, self.num_free, new)
        self.num_free += new - old

    def take(
        self, slots: npt.NDArray[np.int32], workers: npt.NDArray[np.int32], last_use: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Make these copies of rows that had none; those of a slot stand side by side. Returns them."""
        self.reserve(len(slots))
        self.num_free -= len(slots)
        taken = self.free[self.num_free : self.num_free + len(slots)].copy()
        goes_on = np.append(slots[:-1] == slots[1:], False)[: len(slots)]
        self.copies["slot"][taken] = slots
        self.copies["worker"][taken] = workers
        self.copies["last_use"][taken] = last_use
        self.copies["next"][taken] = np.where(goes_on, np.roll(taken, -1), -1)
        begins = np.append(True, ~goes_on[:-1])[: len(slots)]
        self.head[slots[begins]] = taken[begins]
        return taken

    def victims(self, num_victims: int) -> npt.NDArray[np.int32]:
        """The copies that were just put on the stack, in order."""
        return self.free[self.num_free : self.num_free + num_victims]
