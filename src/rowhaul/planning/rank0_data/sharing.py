"""Data that only rank 0 can read: it sends ids to every host, and other values where they are trained.

On each rank one thread uses the ``data`` links. Every rank knows the sequence of messages: first a few
batches of ids; then, with each iteration that may be planned, the assignment of samples to workers (from
the leader of rank 0's host to rank 0), the dense values and labels that each host trains, and the ids of one
more batch. So rank 0 is at most `AHEAD` batches beyond what a planner looks at, and between two segments of
training no thread waits in the network.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from rowhaul._activity import Activity, doing
from rowhaul._threads import Failure, SerialExecutor
from rowhaul.data.samples import Samples
from rowhaul.planning.planner import check_samples
from rowhaul.planning.rank0_data.inbox import Inbox, Workers, trained_by
from rowhaul.planning.rank0_data.messages import (
    HEADER_BYTES,
    Description,
    Header,
    Kind,
    pack_dense,
    pack_ids,
    unpack_ids,
    without_dense,
)
from rowhaul.transport.base import Bytes, LinkError, Links, Transfer

READER = 0  # the rank that has the files
AHEAD = 4  # batches sent beyond those that a scheduler looks at
_IN_FLIGHT = 16  # most messages in flight

_KIND_NAMES = {Kind.IDS: "ids", Kind.DENSE: "dense", Kind.WHOLE: "evaluation"}


class DataEnd(ABC):
    """One rank's end of the data; see `DataSource` and `DataReceiver`.

    All ranks count batches alike, so that none waits for a message that is not sent.
    """

    def __init__(
        self, links: Links, inbox: Inbox | None, look_ahead: int, failure: Failure, ahead: int
    ) -> None:
        self.sent: Counter[str] = Counter()  # bytes by kind: ids, dense, evaluation, other
        self.inbox = inbox  # where this rank plans for its host
        self.executor = SerialExecutor("data", failure)
        self._links, self._failure = links, failure
        self._window = look_ahead + ahead
        self._num_known = 0  # batches whose ids have been sent, but not their dense values
        self._has_ended = False  # there are no more batches

    def serve(self) -> None:
        """Send or receive the data of one more iteration."""
        self.executor.submit(self._serve)

    def close(self) -> None:
        """End the thread and all waits for it."""
        if self.inbox is not None:
            self.inbox.close()
        # After a failure the thread may be stuck in the network: abandon it.
        self.executor.close(5.0 if self._failure.error is None else 0.5)

    def _fill(self) -> None:
        while not self._has_ended and self._num_known < self._window:
            self._next_ids()

    def _serve(self) -> None:
        if self._num_known:
            self._next_dense()
            self._num_known -= 1
            self._fill()

    @abstractmethod
    def _next_ids(self) -> None:
        """Send or receive the ids of one more batch, or the end."""

    @abstractmethod
    def _next_dense(self) -> None:
        """Send or receive the dense values and labels of the oldest known batch."""


class DataSource(DataEnd):
    """Rank 0's end: reads batches and sends them.

    Args:
        links: between all ranks; used by nothing else.
        samples: the global batches.
        hosts: the workers of each host, by the rank that plans for it.
        leader: the one of these that plans for rank 0's own host.
        look_ahead: batches that schedulers know beyond the one that they plan.
        failure: of this rank.
        ahead: batches sent beyond those; of a stream 1, as all behind a batch in line wait for its samples.
        end_waiting: ends the batches if they wait for something that may never come.
    """

    def __init__(
        self,
        links: Links,
        samples: Iterable[Samples],
        hosts: Mapping[int, Sequence[int]],
        leader: int,
        look_ahead: int,
        failure: Failure,
        ahead: int = AHEAD,
        end_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        inbox = Inbox(hosts[leader], failure, plans_for_reader=True) if leader == READER else None
        super().__init__(links, inbox, look_ahead, failure, ahead)
        self.error: Exception | None = None  # that ended the batches
        self._leader, self._end_waiting = leader, end_waiting
        self._is_closing = False
        self._source: Iterator[Samples] = iter(samples)
        self._description: Description | None = None
        self._unassigned: deque[Samples] = deque()  # sent, but for their dense values
        self._in_flight: deque[Transfer] = deque()
        self._leaders = [rank for rank in hosts if rank != READER]
        self._training = {rank: workers for rank, workers in hosts.items() if workers}
        self.executor.submit(self._fill)

    def close(self) -> None:
        """End the thread and all waits for it, here and on the other ranks, and close the files."""
        self._is_closing = True
        self._end_waiting()
        self.executor.submit(lambda: self._wait_sent(0))
        super().close()
        with contextlib.suppress(AttributeError, ValueError):  # cannot be closed, or is being read
            self._source.close()  # type: ignore[attr-defined]  # generators have it, other iterators may not

    def send(self, messages: Mapping[int, tuple[Header, Bytes | None]]) -> None:
        """In the data thread: send messages of one kind to some ranks; payloads must not change any more."""
        for kind in {header.kind for header, _ in messages.values()}:  # one, or none
            payloads = {rank: payload for rank, (_, payload) in messages.items() if payload is not None}
            self._post({rank: header.to_bytes() for rank, (header, _) in messages.items()}, "other")
            self._post(payloads, _KIND_NAMES.get(kind, "other"))

    def _next_ids(self) -> None:
        try:
            with doing(Activity.READING):
                samples = next(self._source, None)
            if samples is not None:
                self._check(samples)
        except Exception as error:  # raised on all ranks once the batches before are trained
            self.error, samples = error, None
        if samples is None:
            # Ranks that were waiting for more may have left since, where this one closes late.
            with contextlib.suppress(*([LinkError] if self._is_closing else [])):
                self._end()
            return
        self._send_to_leaders(Kind.IDS, pack_ids(samples), len(samples))
        self._unassigned.append(samples)
        self._num_known += 1
        if self.inbox is not None:
            self.inbox.ids.put(without_dense(samples))

    def _check(self, samples: Samples) -> None:
        check_samples(samples)
        if self._description is not None:
            self._description.check(samples)
        else:
            self._describe(Description.of(samples))

    def _describe(self, description: Description) -> None:
        self._description = description
        self._send_to_leaders(Kind.DESCRIPTION, description.to_bytes())
        if self.inbox is not None:
            self.inbox.described.set_result(description)

    def _end(self) -> None:
        self._has_ended = True
        if self._description is None:
            self._describe(Description())
        self._send_to_leaders(Kind.END)
        if self.inbox is not None:
            self.inbox.ids.put(None)

    def _send_to_leaders(self, kind: Kind, payload: Bytes | None = None, num_samples: int = 0) -> None:
        header = Header(kind, 0 if payload is None else len(payload), num_samples)
        self.send(dict.fromkeys(self._leaders, (header, payload)))

    def _next_dense(self) -> None:
        worker, samples = self._assignment(), self._unassigned.popleft()
        parts = {
            rank: pack_dense(samples, trained_by(workers, worker)) for rank, workers in self._training.items()
        }
        if self.inbox is not None and READER in parts:
            self.inbox.dense.put(parts.pop(READER))
        self.send({rank: (Header(Kind.DENSE, len(part)), part) for rank, part in parts.items()})

    def _assignment(self) -> Workers:
        """Wait until the next batch is planned; return the worker of each sample."""
        if self.inbox is not None:
            return self.inbox.assignment()
        answer = np.empty(len(self._unassigned[0]), np.int16)
        with doing(Activity.AWAITING_PLAN):
            self._links.post({self._leader: answer.view(np.uint8)}, {}).wait_received()
        self.sent["other"] += answer.nbytes
        return answer.astype(np.int32)

    def _post(self, sends: Mapping[int, Bytes], what: str) -> None:
        if sends:
            self.sent[what] += sum(map(len, sends.values()))
            self._in_flight.append(self._links.post({}, sends))
            self._wait_sent(_IN_FLIGHT)

    def _wait_sent(self, most: int) -> None:
        with doing(Activity.WAITING):
            while len(self._in_flight) > most:
                self._in_flight.popleft().wait_sent()


class DataReceiver(DataEnd):
    """The end of any other rank.

    Args:
        links: between all ranks; used by nothing else.
        workers: of this host, where this rank plans for it; None elsewhere, where only batches for
            evaluation arrive.
        look_ahead: as on rank 0.
        failure: of this rank.
        shares_reader: whether this rank plans for rank 0's host.
        ahead: as on rank 0.
    """

    def __init__(
        self,
        links: Links,
        workers: Sequence[int] | None,
        look_ahead: int,
        failure: Failure,
        *,
        shares_reader: bool = False,
        ahead: int = AHEAD,
    ) -> None:
        inbox = None if workers is None else Inbox(workers, failure, plans_for_reader=shares_reader)
        super().__init__(links, inbox, look_ahead, failure, ahead)
        self._shares_reader = shares_reader
        self._description = Description()
        if inbox is not None:
            self.executor.submit(self._fill)

    def receive(self) -> tuple[Header, Bytes]:
        """In the data thread: receive the next message of rank 0."""
        header = Header.from_bytes(self._receive_bytes(HEADER_BYTES))
        return header, self._receive_bytes(header.num_bytes)

    def _receive_bytes(self, size: int) -> Bytes:
        data = np.empty(size, np.uint8)
        with doing(Activity.AWAITING_DATA):
            self._links.post({READER: data}, {}).wait_received()
        return data

    def _next_ids(self) -> None:
        assert self.inbox is not None
        header, payload = self.receive()
        if header.kind == Kind.DESCRIPTION:
            self._description = Description.from_bytes(payload)
            self.inbox.described.set_result(self._description)
            header, payload = self.receive()
        if header.kind == Kind.IDS:
            self.inbox.ids.put(unpack_ids(payload, self._description)[0])
            self._num_known += 1
        else:
            self._has_ended = True
            self.inbox.ids.put(None)

    def _next_dense(self) -> None:
        assert self.inbox is not None
        if self._shares_reader:
            worker = self.inbox.assignment().astype(np.int16)
            with doing(Activity.WAITING):
                self._links.post({}, {READER: worker.view(np.uint8)}).wait_sent()
        if self.inbox.workers:
            self.inbox.dense.put(self.receive()[1])
