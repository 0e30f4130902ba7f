"""Ranks of a host that read the same files together: each decodes some columns, for the rank that plans.

That rank, the host's *leader*, asks the others for one block of a row group after the other, always one more
than it needs now, so that they decode while it does. They send what they have decoded through memory.
"""

from __future__ import annotations

import contextlib
import enum
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from rowhaul._activity import Activity, doing
from rowhaul._threads import Failure, SerialExecutor
from rowhaul.data.column_shares import ColumnShare, DecodedColumns, divide_columns
from rowhaul.data.stream import SampleStream
from rowhaul.errors import ClusterError, DataError
from rowhaul.planning.disagreement import ranks_text
from rowhaul.planning.packing import Arranged, restore
from rowhaul.transport.base import Bytes, LinkError, Links, Transfer
from rowhaul.transport.remote_errors import read_report, write_report

_NUMBERS = 3  # in a message, the first says what it is
_NO_FILES = bytes(16)  # instead of the digest of the files: this rank has a loader of its own


class _Ask(enum.IntEnum):
    """What a leader asks for; two numbers follow."""

    SHARE = 0  # columns: which share, of how many; not answered
    ROW_GROUP = enum.auto()  # the first block: which row group, after how many rows
    BLOCK = enum.auto()  # the next one
    NOTHING = enum.auto()  # any more; not answered


class _Answer(enum.IntEnum):
    """What the answer is; how many bytes follow."""

    BLOCK = 0
    ERROR = enum.auto()


def near_ranks(links: Links, local_ranks: Sequence[int]) -> list[int]:
    """Return the other ranks of this host, if all of them can be reached through memory."""
    others = [rank for rank in local_ranks if rank != links.rank]
    near: frozenset[int] = getattr(links, "near", frozenset())  # a user's transport may not know
    return others if near.issuperset(others) else []


def read_together(stream: SampleStream | None, links: Links, others: Sequence[int], failure: Failure) -> None:
    """Share the columns of a stream with other ranks until it ends; the leader calls this.

    Args:
        stream: None where the leader has a loader of its own.
        links: to the other ranks; from now on the stream's.
        others: ranks that each make a `ColumnServer`.
        failure: of this rank; once it is set, nothing is waited for when the stream ends.

    Raises:
        DataError: if some have opened other files.
    """
    mine = _NO_FILES if stream is None else stream.files_digest()
    digests = {rank: _receive(links, rank, len(mine)).tobytes() for rank in others}
    helpers = [rank for rank, one in digests.items() if one != _NO_FILES]
    different = [rank for rank in helpers if digests[rank] != mine]
    if stream is not None and different:
        raise DataError(
            f"{ranks_text(different)} opened other files, or with another schema, than rank {links.rank}, "
            "which plans for the same host: give every rank the same files, in the same order"
        )
    shares, readers = [], []
    if stream is not None and helpers:
        shares = divide_columns(stream.schema, stream.column_costs(), 1 + len(helpers))
    for number, rank in enumerate(helpers, 1):
        if number < len(shares):
            _send(links, rank, _Ask.SHARE, number, 1 + len(helpers))
            readers.append(_Columns(links, rank, shares[number], failure))
        else:  # there are fewer columns than ranks
            _send(links, rank, _Ask.NOTHING)
    if stream is not None and readers:
        stream.share_columns(shares[0], readers)


class ColumnServer:
    """Decodes columns for the leader, in a thread of its own.

    Args:
        stream: over the same files as the leader's; None on a rank that has a loader of its own.
        links: to the leader; used by nothing else.
        leader: its rank.
        failure: of this rank.
    """

    def __init__(self, stream: SampleStream | None, links: Links, leader: int, failure: Failure) -> None:
        self._links, self._leader = links, leader
        digest = _NO_FILES if stream is None else stream.files_digest()
        links.post({}, {leader: np.frombuffer(bytearray(digest), np.uint8)}).wait_sent()
        self._executor: SerialExecutor | None = None
        if stream is not None:
            self._executor = SerialExecutor("columns", failure)
            self._executor.submit(lambda: self._serve(stream))

    def close(self) -> None:
        """Wait until the leader has ended its stream; abandon the thread if it does not."""
        if self._executor is not None:
            self._executor.close()

    def _serve(self, stream: SampleStream) -> None:
        share: ColumnShare | None = None
        blocks: Iterator[DecodedColumns] = iter(())
        while True:
            what, first, second = _receive_numbers(self._links, self._leader)
            if what == _Ask.NOTHING:
                return
            if what == _Ask.SHARE:
                share = divide_columns(stream.schema, stream.column_costs(), second)[first]
                continue
            try:
                if what == _Ask.ROW_GROUP:
                    assert share is not None
                    blocks = stream.read_columns(share, first, second)
                with doing(Activity.READING):
                    decoded = next(blocks)
            except Exception as error:
                report = write_report(error, self._links.rank)
                self._answer(_Answer.ERROR, np.frombuffer(bytearray(report), np.uint8))
                continue
            self._answer(_Answer.BLOCK, _packed(decoded))

    def _answer(self, what: _Answer, payload: Bytes) -> None:
        _send(self._links, self._leader, what, len(payload))
        self._links.post({}, {self._leader: payload}).wait_sent()


class _Columns:
    """The columns that another rank decodes; an `OtherReader`."""

    def __init__(self, links: Links, rank: int, share: ColumnShare, failure: Failure) -> None:
        self.share = share
        self._links, self._rank, self._failure = links, rank, failure
        self._is_stopped = False
        self._asked: deque[Transfer] = deque()  # what was not answered yet

    def read_columns(self, place: int, skip: int, num_blocks: int) -> Iterator[DecodedColumns]:
        """Ask for a row group; what the rank still owes of another one is dropped."""
        self._drop_answers()
        self._ask(_Ask.ROW_GROUP, place, skip)
        return self._blocks(num_blocks)

    def stop(self) -> None:
        """Stop yielding blocks; any thread may call this."""
        self._is_stopped = True

    def close(self) -> None:
        """End the other rank's thread, unless it has left."""
        with contextlib.suppress(LinkError):
            if self._failure.error is None:  # the links may be used again
                self._drop_answers()
            self._links.post({}, {self._rank: _message(_Ask.NOTHING)})

    def _blocks(self, count: int) -> Iterator[DecodedColumns]:
        for number in range(count):
            if self._is_stopped:
                raise ClusterError("reading was ended while it went on")  # to nobody: its stream is closed
            if number + 1 < count:
                self._ask(_Ask.BLOCK)
            what, payload = self._receive_answer()
            if what == _Answer.ERROR:
                raise read_report(payload.tobytes(), "reads a part of the columns")
            yield restore(payload.data)

    def _drop_answers(self) -> None:
        while self._asked:
            self._receive_answer()

    def _ask(self, what: _Ask, *numbers: int) -> None:
        self._asked.append(self._links.post({}, {self._rank: _message(what, *numbers)}))

    def _receive_answer(self) -> tuple[int, Bytes]:
        with doing(Activity.WAITING):
            what, size = _receive_numbers(self._links, self._rank)[:2]
            payload = _receive(self._links, self._rank, size)
        self._asked.popleft().wait_sent()
        return what, payload


def _packed(decoded: DecodedColumns) -> Bytes:
    arranged = Arranged(decoded)
    memory = np.empty(arranged.size, np.uint8)
    arranged.write_to(memory)
    return memory


def _send(links: Links, rank: int, *numbers: int) -> None:
    links.post({}, {rank: _message(*numbers)}).wait_sent()


def _message(*numbers: int) -> Bytes:
    message = np.zeros(_NUMBERS, np.int64)
    message[: len(numbers)] = numbers
    return message.view(np.uint8)


def _receive_numbers(links: Links, rank: int) -> list[int]:
    numbers: list[int] = _receive(links, rank, 8 * _NUMBERS).view(np.int64).tolist()
    return numbers


def _receive(links: Links, rank: int, size: int) -> Bytes:
    data = np.empty(size, np.uint8)
    links.post({rank: data}, {}).wait_received()
    return data
