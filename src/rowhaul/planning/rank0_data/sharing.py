"""Data that only rank 0 can read: ids go to every host, which plans from them, the rest where it is trained.

On each rank one lane uses the ``data`` links. Every rank knows what comes next on them: the first batches
at the beginning; then, with each iteration that may be planned, who trains what (from the leader of rank
0's host to rank 0), the dense values and labels of what each host trains, and the ids of one more batch.
So rank 0 is never more than `AHEAD` batches beyond what a planner looks at, and between two segments of
training no lane waits in the network.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
from rowhaul.transport.base import Bytes, Links, Transfer

READER = 0  # the rank that has the files
AHEAD = 4  # batches sent out beyond those that a scheduler looks at
_UNDER_WAY = 16  # messages sent, not waited for

_KIND_NAMES = {Kind.IDS: "ids", Kind.DENSE: "dense", Kind.WHOLE: "evaluation"}


class DataSource:
    """Rank 0's end: reads batches and sends them out.

    Args:
        links: between all ranks; used by nothing else.
        samples: the global batches.
        hosts: the workers of each host, by the rank that plans for it.
        leader: which of these plans for rank 0's own host.
        look_ahead: batches that schedulers know beyond the one that they plan.
        failure: of this rank.
    """

    def __init__(
        self,
        links: Links,
        samples: Iterable[Samples],
        hosts: Mapping[int, Sequence[int]],
        leader: int,
        look_ahead: int,
        failure: Failure,
    ) -> None:
        self.sent: Counter[str] = Counter()  # bytes: ids, dense, evaluation; and what is neither of them
        self.error: Exception | None = None  # for which there are no more batches
        self.executor = SerialExecutor("data", failure)
        self._links, self._leader, self._failure = links, leader, failure
        self._progress = _Progress(look_ahead)
        self._source: Iterator[Samples] = iter(samples)
        self._description: Description | None = None
        self._unassigned: deque[Samples] = deque()  # sent, but for their dense values
        self._under_way: deque[Transfer] = deque()
        self._leaders = [rank for rank in hosts if rank != READER]
        self._training = {rank: workers for rank, workers in hosts.items() if workers}
        self.inbox: Inbox | None = None
        if leader == READER:
            self.inbox = Inbox(hosts[leader], failure, tells_who_trains=True)
        self.executor.submit(self._begin)

    def serve(self) -> None:
        """The next iteration may be planned."""
        self.executor.submit(self._serve)

    def close(self) -> None:
        """End the lane, and let nobody wait for it."""
        if self.inbox is not None:
            self.inbox.close()
        self.executor.submit(self._wait_sent)
        self.executor.close(_closing_seconds(self._failure))
        with contextlib.suppress(AttributeError, ValueError):  # cannot be closed, or is just being read
            self._source.close()  # type: ignore[attr-defined]  # generators have it, other iterators may not

    def tell(self, messages: Mapping[int, tuple[Header, Bytes | None]]) -> None:
        """In the lane: send messages of one kind to some ranks; payloads must not be changed any more."""
        for kind in {header.kind for header, _ in messages.values()}:  # one, or none
            payloads = {rank: payload for rank, (_, payload) in messages.items() if payload is not None}
            self._post({rank: header.to_bytes() for rank, (header, _) in messages.items()}, "other")
            self._post(payloads, _KIND_NAMES.get(kind, "other"))

    def _begin(self) -> None:
        while self._progress.wants_more:
            self._read_and_send()

    def _read_and_send(self) -> None:
        """One more batch, or why there is none, to everyone who plans."""
        try:
            samples = next(self._source, None)
            if samples is not None:
                self._check(samples)
        except Exception as error:  # all batches before are trained; then whoever trains is to ask for it
            self.error, samples = error, None
        if samples is None:
            self._end()
            return
        payload = pack_ids(samples)
        self._tell_leaders(Header(Kind.IDS, len(payload), len(samples)), payload)
        self._unassigned.append(samples)
        self._progress.num_known += 1
        if self.inbox is not None:
            self.inbox.add(without_dense(samples))

    def _check(self, samples: Samples) -> None:
        check_samples(samples)
        if self._description is not None:
            self._description.check(samples)
        else:
            self._describe(Description.of(samples))

    def _describe(self, description: Description) -> None:
        self._description = description
        payload = description.to_bytes()
        self._tell_leaders(Header(Kind.DESCRIPTION, len(payload)), payload)
        if self.inbox is not None:
            self.inbox.describe(description)

    def _end(self) -> None:
        self._progress.has_ended = True
        if self._description is None:
            self._describe(Description())
        self._tell_leaders(Header(Kind.END))
        if self.inbox is not None:
            self.inbox.end()

    def _tell_leaders(self, header: Header, payload: Bytes | None = None) -> None:
        self.tell(dict.fromkeys(self._leaders, (header, payload)))

    def _serve(self) -> None:
        if not self._progress.num_known:
            return
        worker, samples = self._assignment(), self._unassigned.popleft()
        self._progress.num_known -= 1
        parts = {
            rank: pack_dense(samples, trained_by(workers, worker)) for rank, workers in self._training.items()
        }
        if self.inbox is not None and READER in parts:
            self.inbox.add_dense(parts.pop(READER))
        self.tell({rank: (Header(Kind.DENSE, len(part)), part) for rank, part in parts.items()})
        if self._progress.wants_more:
            self._read_and_send()

    def _assignment(self) -> Workers:
        """Who trains the samples of the next batch, once it is planned."""
        if self.inbox is not None:
            return self.inbox.assignment()
        answer = np.empty(len(self._unassigned[0]), np.int16)
        self._links.post({self._leader: answer.view(np.uint8)}, {}).wait_received()
        self.sent["other"] += answer.nbytes
        return answer.astype(np.int32)

    def _post(self, sends: Mapping[int, Bytes], what: str) -> None:
        if not sends:
            return
        self.sent[what] += sum(map(len, sends.values()))
        self._under_way.append(self._links.post({}, sends))
        while len(self._under_way) > _UNDER_WAY:
            self._under_way.popleft().wait_sent()

    def _wait_sent(self) -> None:
        while self._under_way:
            self._under_way.popleft().wait_sent()


class DataReceiver:
    """The end of any other rank.

    Args:
        links: between all ranks; used by nothing else.
        workers: of this host, where this rank plans for it; None elsewhere: then batches for evaluation
            are all that comes.
        shares_reader: whether this rank plans for the host of rank 0.
        look_ahead: as rank 0 has it.
        failure: of this rank.
    """

    def __init__(
        self,
        links: Links,
        workers: Sequence[int] | None,
        look_ahead: int,
        failure: Failure,
        *,
        shares_reader: bool = False,
    ) -> None:
        self.sent: Counter[str] = Counter()
        self.executor = SerialExecutor("data", failure)
        self.inbox: Inbox | None = None
        self._links, self._shares_reader, self._failure = links, shares_reader, failure
        self._progress = _Progress(look_ahead)
        self._description = Description()
        if workers is not None:
            self.inbox = Inbox(workers, failure, tells_who_trains=shares_reader)
            self.executor.submit(self._begin)

    def serve(self) -> None:
        """The next iteration may be planned."""
        if self.inbox is not None:
            self.executor.submit(self._serve)

    def close(self) -> None:
        """End the lane, and let nobody wait for it."""
        if self.inbox is not None:
            self.inbox.close()
        self.executor.close(_closing_seconds(self._failure))

    def receive(self) -> tuple[Header, Bytes]:
        """In the lane: the next message of rank 0."""
        header = Header.from_bytes(self._receive_bytes(HEADER_BYTES))
        return header, self._receive_bytes(header.num_bytes)

    def _receive_bytes(self, size: int) -> Bytes:
        data = np.empty(size, np.uint8)
        self._links.post({READER: data}, {}).wait_received()
        return data

    def _begin(self) -> None:
        while self._progress.wants_more:
            self._receive_batch()

    def _receive_batch(self) -> None:
        """One more batch, or why there is none."""
        inbox = self.inbox
        assert inbox is not None
        header, payload = self.receive()
        if header.kind == Kind.DESCRIPTION:
            self._description = Description.from_bytes(payload)
            inbox.describe(self._description)
            header, payload = self.receive()
        if header.kind == Kind.IDS:
            inbox.add(unpack_ids(payload, self._description)[0])
            self._progress.num_known += 1
            return
        self._progress.has_ended = True
        inbox.end()

    def _serve(self) -> None:
        inbox = self.inbox
        assert inbox is not None
        if not self._progress.num_known:
            return
        self._progress.num_known -= 1
        if self._shares_reader:
            worker = inbox.assignment().astype(np.int16)
            self._links.post({}, {READER: worker.view(np.uint8)}).wait_sent()
        if inbox.trains:
            inbox.add_dense(self.receive()[1])
        if self._progress.wants_more:
            self._receive_batch()


@dataclass
class _Progress:
    """What all who send and receive batches know of them alike, so that none waits for what does not come."""

    look_ahead: int
    num_known: int = 0  # batches whose ids have been sent, and whose dense values have not
    has_ended: bool = False  # there are no more batches

    @property
    def wants_more(self) -> bool:
        """Whether one more batch is sent."""
        return not self.has_ended and self.num_known < self.look_ahead + AHEAD


def _closing_seconds(failure: Failure) -> float:
    """How long to wait for a lane: after a failure it may be stuck in the network, and is left behind."""
    return 5.0 if failure.error is None else 0.5
