"""Collective calls: each one first compares what the ranks are about to do, then exchanges payloads.

A rank that makes another call, or uses another ticket, is found before any payload moves: otherwise both ends
would wait for messages of sizes that the other does not know. A rank that makes no call is found when the
links time out.

Payloads go round in a ring: in step i, rank r sends to rank (r + i) mod n, so that no rank is asked by all at
once. Receives are posted before a message can arrive: Gloo's thread was seen to spin for a message without a
receive, which takes the core from a rank that is late (the cause is not established; early receives only
lessen it). The next headers are therefore awaited from the end of the last call on.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from rowhaul.database.settings import DatabaseSettings
from rowhaul.errors import ClusterError, ConfigError
from rowhaul.transport.base import Bytes, LinkError, Links, Transfer, swap
from rowhaul.transport.gloo import GlooLinks, connect_group

Int64s = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Result = TypeVar("Result")
OPERATIONS = (
    *("prefetch", "pull", "push", "update", "delete", "migrate", "snapshot", "snapshot.pull"),
    *("save", "load", "total_rows", "discard_pushed"),
)
NUM_SEQUENCES = 3  # of calls: index, rows, snapshots; each is used by one thread at a time
_FIXED = 3  # words of a header: operation, number of the call, subject


class RefusedError(Exception):
    """A call failed in a way that all ranks know: raise the ``reason``, and the next call may follow."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Calls:
    """One sequence of calls that every rank makes in the same order.

    Args:
        links: used by nothing else.
        num_details: numbers that a call can send to each rank with its header.
    """

    def __init__(self, links: Links, num_details: int) -> None:
        self.rank, self.num_ranks = links.rank, links.num_ranks
        self._links = links
        self._targets = [(self.rank + step) % self.num_ranks for step in range(1, self.num_ranks)]
        self._sources = [(self.rank - step) % self.num_ranks for step in range(1, self.num_ranks)]
        self._headers = np.empty((self.num_ranks, _FIXED + num_details), np.int64)  # the next ones
        self._awaited: Transfer | None = None  # of the next headers
        self._num_calls = 0
        self._lock = threading.Lock()
        self._failure: str | None = None

    @contextmanager
    def call(self) -> Iterator[None]:
        """Make one call at a time; after a failure in the middle of a call, refuse all others."""
        with self._lock:
            if self._failure is not None:
                raise ClusterError(f"the database failed before and cannot continue: {self._failure}")
            try:
                self.await_headers()
                yield
                self.await_headers()  # from now on: other ranks may be ahead
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

    def compare(
        self,
        operation: str,
        subject: int,
        details: Int64s | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> Int64s:
        """Check that all ranks make the same call; send row ``p`` of details to rank ``p``, return theirs.

        ``meanwhile`` runs while the headers travel.
        """
        self._num_calls += 1
        own = [OPERATIONS.index(operation), self._num_calls, subject]
        headers = np.zeros_like(self._headers)
        headers[:, :_FIXED] = own
        num_details = 0 if details is None else details.shape[1]
        headers[:, _FIXED : _FIXED + num_details] = 0 if details is None else details
        awaited = self.await_headers()
        sent = self._links.post({}, {rank: headers[rank].view(np.uint8) for rank in self._targets})
        if meanwhile is not None:
            meanwhile()
        awaited.wait_received()
        self._awaited = None
        sent.wait_sent()
        heard = self._headers.copy()
        heard[self.rank] = headers[self.rank]
        for rank in range(self.num_ranks):
            if heard[rank, :_FIXED].tolist() != own:
                self._failure = f"rank {rank} made another call"
                raise ClusterError(
                    f"rank {rank} calls {_describe(heard[rank])}, but rank {self.rank} {_describe(own)}: all "
                    "ranks must make the same calls in the same order, with tickets of the same prefetch"
                )
        return heard[:, _FIXED : _FIXED + num_details]

    def await_headers(self) -> Transfer:
        """Post the receives of the next headers, after those of everything that arrives before them."""
        if self._awaited is None:
            self._awaited = self._links.post(
                {rank: self._headers[rank].view(np.uint8) for rank in self._sources}, {}
            )
        return self._awaited

    def attempt(
        self,
        operation: str,
        subject: int,
        work: Callable[[], Result],
        flag: Callable[[Result], bool] = lambda result: False,
    ) -> tuple[Result, bool]:
        """Run work on every rank, and raise on all ranks if it failed on any; further calls may follow.

        Returns this rank's result, and whether any rank's result has the flag.
        """
        error: BaseException | None = None
        is_flagged = False
        try:
            result = work()
            is_flagged = flag(result)
        except Exception as failed:
            error = failed
        own = np.zeros((self.num_ranks, 2), np.int64)
        own[:] = error is not None, is_flagged
        heard = self.compare(operation, subject, own)
        if error is not None:
            raise RefusedError(error)
        if heard[:, 0].any():
            others = ", ".join(str(rank) for rank in np.flatnonzero(heard[:, 0]))
            raise RefusedError(ClusterError(f"{operation} failed on rank {others}; its error says why"))
        return result, bool(heard[:, 1].any())

    def swap(self, operation: str, subject: int, given: Sequence[Sequence[Array]]) -> list[Sequence[Array]]:
        """Send arrays ``given[p]`` to rank ``p``, and return what every rank sent here.

        Only the lengths may differ: array ``i`` has the same dtype and trailing shape everywhere.
        """
        counts = self.compare(operation, subject, np.array([[len(one) for one in to] for to in given]))
        kinds = [(one.dtype, one.shape[1:]) for one in given[self.rank]]
        widths = np.array([dtype.itemsize * int(np.prod(shape)) for dtype, shape in kinds])
        messages = swap(
            self._links,
            {rank: int(counts[rank] @ widths) for rank in self._sources},
            {rank: np.concatenate([_as_bytes(one) for one in given[rank]]) for rank in self._targets},
        )
        self.await_headers()
        arrived = list(given)
        for rank, message in messages.items():
            parts = np.split(message, np.cumsum(counts[rank] * widths)[:-1])
            arrived[rank] = [_as_array(part, *kind) for part, kind in zip(parts, kinds, strict=True)]
        return arrived

    def total(self, operation: str, subject: int, count: int) -> int:
        """Sum a number over all ranks."""
        return int(self.compare(operation, subject, np.full((self.num_ranks, 1), count)).sum())

    def receive(self, arrays: Sequence[Array], bounds: Sequence[Sequence[int]]) -> list[Transfer]:
        """Post receives into arrays, whose rows from rank ``p`` are ``bounds[i][p]:bounds[i][p + 1]``."""
        return [
            self._links.post({rank: _cut(array, cut, rank) for rank in self._sources}, {})
            for array, cut in zip(arrays, bounds, strict=True)
        ]

    def send(self, arrays: Sequence[Array], bounds: Sequence[Sequence[int]]) -> list[Transfer]:
        """Send the rows of arrays to the ranks, in the order of the ring."""
        return [
            self._links.post({}, {rank: _cut(array, cut, rank) for rank in self._targets})
            for array, cut in zip(arrays, bounds, strict=True)
        ]


def form_links(
    group: dist.ProcessGroup | None, timeout_seconds: float
) -> tuple[list[GlooLinks], Callable[[], None]]:
    """Links between the ranks of a group, one for each sequence of calls, and what closes them."""
    if not dist.is_initialized():
        raise ConfigError(
            "a distributed database needs torch.distributed: call init_process_group('gloo') first, "
            "or use rowhaul.database.EmbeddingDatabase in one process"
        )
    ranks = None if group is None else dist.get_process_group_ranks(group)
    groups = [
        dist.new_group(
            ranks,
            timeout=timedelta(seconds=timeout_seconds),
            backend="gloo",
            use_local_synchronization=ranks is not None,
        )
        for _ in range(NUM_SEQUENCES)
    ]
    sequences = [connect_group(one, timeout=timeout_seconds) for one in groups]

    def close() -> None:
        for links, one in zip(sequences, groups, strict=True):
            links.close()
            dist.destroy_process_group(one)

    return sequences, close


def check_equal(links: Links, settings: DatabaseSettings) -> None:
    """Refuse ranks whose tables, optimizer, dtype or seed differ."""
    text = f"{settings.tables} {settings.optimizer} {settings.dtype} {settings.seed}"
    digest = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), np.uint8)
    ranks = range(links.num_ranks)
    heard = swap(links, dict.fromkeys(ranks, len(digest)), dict.fromkeys(ranks, digest))
    for rank, other in heard.items():
        if other.tobytes() != digest.tobytes():
            raise ClusterError(
                f"rank {rank} has other tables, optimizer, lr, dtype or seed than rank {links.rank}, "
                f"which has {text}; pass the same on all ranks"
            )


def wait_received(transfers: Sequence[Transfer]) -> None:
    """Wait until messages have arrived."""
    for transfer in transfers:
        transfer.wait_received()


def wait_sent(transfers: Sequence[Transfer]) -> None:
    """Wait until sent buffers may be reused."""
    for transfer in transfers:
        transfer.wait_sent()


def subject_of(lr: float) -> int:
    """A learning rate as an integer with the same bits."""
    number: int = struct.unpack("<q", struct.pack("<d", lr))[0]
    return number


def _describe(header: Int64s | list[int]) -> str:
    operation, number, subject = (int(value) for value in header[:_FIXED])
    if not 0 <= operation < len(OPERATIONS):
        return "an operation that this version of Rowhaul does not know"
    name = OPERATIONS[operation]
    if name == "update":
        return f"update(lr={struct.unpack('<d', struct.pack('<q', subject))[0]!r}) as call {number}"
    return f"{name} {subject} as call {number}"


def _as_bytes(array: Array) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _as_array(part: Bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """A part of a message as an array; copied if it would not be aligned."""
    aligned = part if part.ctypes.data % dtype.itemsize == 0 else part.copy()
    return aligned.view(dtype).reshape(-1, *shape)


def _cut(array: Array, bounds: Sequence[int], rank: int) -> Bytes:
    return array[bounds[rank] : bounds[rank + 1]].reshape(-1).view(np.uint8)
