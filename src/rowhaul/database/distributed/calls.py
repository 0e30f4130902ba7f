"""Calls that all ranks make together: every one begins by comparing what the ranks are about to do.

A rank that calls something else, or the same with another ticket, is found before any payload moves: both
ends would otherwise wait for messages of sizes that the other does not know. One that calls nothing at all
is found when the process group's time-out has passed.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from rowhaul.database.distributed.ring import Ring
from rowhaul.errors import ClusterError
from rowhaul.transport.base import LinkError, Links

Int64s = npt.NDArray[np.int64]
OPERATIONS = (
    *("prefetch", "pull", "push", "update", "delete", "migrate", "snapshot", "snapshot.pull"),
    *("save", "load", "total_rows"),
)
_FIXED = 3  # operation, its number, its subject


class Calls:
    """One sequence of calls that every rank makes in the same order.

    Args:
        links: nothing else uses them.
        num_details: numbers that a call may tell every other rank.
    """

    def __init__(self, links: Links, num_details: int) -> None:
        self.ring = Ring(links, _FIXED + num_details)
        self.rank, self.num_ranks = links.rank, links.num_ranks
        self._num_details = num_details
        self._num_calls = 0
        self._lock = threading.Lock()
        self._failure: str | None = None

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call at a time; after a failure in the middle of one there are no more."""
        with self._lock:
            if self._failure is not None:
                raise ClusterError(f"the database failed before and cannot go on: {self._failure}")
            try:
                self.ring.await_headers()
                yield
                self.ring.await_headers()  # from now on: the others may be ahead
            except RefusedError as refused:
                raise refused.reason from None
            except LinkError as error:
                self._failure = str(error)
                raise ClusterError(
                    f"{error}; has every rank made the same calls, in the same order, and is it alive?"
                ) from error
            except BaseException as error:
                self._failure = self._failure or f"{type(error).__name__}: {error}"
                raise

    def tell(
        self,
        operation: str,
        subject: int,
        details: Int64s | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> Int64s:
        """Compare operation and subject with all ranks; exchange details, a row for each rank.

        What is to be done ``meanwhile`` is done while this rank's message is on its way.
        """
        self._num_calls += 1
        own = [OPERATIONS.index(operation), self._num_calls, subject]
        headers = np.zeros((self.num_ranks, _FIXED + self._num_details), np.int64)
        headers[:, :_FIXED] = own
        if details is not None:
            headers[:, _FIXED : _FIXED + details.shape[1]] = details
        heard = self.ring.tell(headers, meanwhile)
        for rank in range(self.num_ranks):
            if heard[rank, :_FIXED].tolist() != own:
                self._failure = f"rank {rank} called something else"
                raise ClusterError(
                    f"rank {rank} calls {_describe(heard[rank])}, but rank {self.rank} {_describe(own)}: all "
                    "ranks must make the same calls in the same order, with tickets of the same prefetch"
                )
        return heard[:, _FIXED:]

    def agree(
        self, operation: str, subject: int, error: BaseException | None, is_special: bool = False
    ) -> bool:
        """Go on if no rank has met an error; otherwise raise on all ranks, and the calls may go on.

        Returns whether anything is special on any rank.
        """
        own = np.empty((self.num_ranks, 2), np.int64)
        own[:] = error is not None, is_special
        heard = self.tell(operation, subject, own)
        if error is not None:
            raise RefusedError(error)
        if heard[:, 0].any():
            others = ", ".join(str(rank) for rank in np.flatnonzero(heard[:, 0]))
            raise RefusedError(ClusterError(f"{operation} failed on rank {others}; its error says why"))
        return bool(heard[:, 1].any())


class RefusedError(Exception):
    """All ranks know that a call failed, and nothing is under way: the ``reason`` is to be raised."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason


def subject_of(lr: float) -> int:
    """A rate as a number that is equal only for equal rates."""
    number: int = struct.unpack("<q", struct.pack("<d", lr))[0]
    return number


def _describe(header: Int64s | list[int]) -> str:
    operation, number, subject = (int(value) for value in header[:_FIXED])
    if not 0 <= operation < len(OPERATIONS):
        return "nothing that this version of Rowhaul knows"
    name = OPERATIONS[operation]
    if name == "update":
        return f"update(lr={struct.unpack('<d', struct.pack('<q', subject))[0]!r}) as call {number}"
    return f"{name} {subject} as call {number}"
