"""Batches to be evaluated, of files that only rank 0 can read: each goes to the one worker that scores it.

Workers take batches in turn. Of a batch that is another's they are told the size alone, so that all count
the same. Rank 0 is a round ahead: when it fails, the others have what they need to come to the point where
they hear of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from rowhaul._threads import Future
from rowhaul.data.samples import Samples
from rowhaul.planning.rank0_data.messages import (
    Description,
    Header,
    Kind,
    pack_dense,
    pack_ids,
    unpack_ids,
    with_dense,
)
from rowhaul.planning.rank0_data.sharing import DataReceiver, DataSource
from rowhaul.transport.base import Bytes


class SentBatches:
    """Rank 0's batches, in order; sends the others theirs as it goes.

    To be iterated once, and closed. What rank 0 gets of the others' batches is their size.

    Args:
        source: this rank's end of the data.
        batches: to be evaluated.
        num_workers: who score them in turn.
        num_samples: of all batches.
    """

    def __init__(
        self, source: DataSource, batches: Iterable[Samples], num_workers: int, num_samples: int
    ) -> None:
        self.num_samples = num_samples
        self._source, self._batches = source, iter(batches)
        self._num_workers = num_workers
        self._description: Description | None = None
        self._told_end = False

    def __iter__(self) -> Iterator[Samples]:
        try:
            here: list[Samples] = []
            while following := list(islice(self._batches, self._num_workers)):
                sent = self._send(following)
                yield from here
                here = sent
            self._end()
            yield from here
        finally:
            self._end()

    def close(self) -> None:
        """Tell the others that nothing more comes, if they do not know."""
        self._end()

    def _send(self, batches: list[Samples]) -> list[Samples]:
        """Send a round; returns what rank 0 needs of it."""
        if self._description is None:
            self._description = Description.of(batches[0])
            self._tell(Kind.DESCRIPTION, self._description.to_bytes(), 0, None)
        for worker, samples in enumerate(batches):
            self._description.check(samples)
            if worker:
                everything = np.arange(len(samples))
                payload = np.concatenate([pack_ids(samples), pack_dense(samples, everything)])
                self._tell(Kind.WHOLE, payload, len(samples), worker)
            else:
                self._tell(Kind.WHOLE, None, len(samples), worker)
        return [batches[0], *map(_of_size, map(len, batches[1:]))]

    def _end(self) -> None:
        if not self._told_end:
            self._told_end = True
            self._tell(Kind.END, None, 0, None)

    def _tell(self, kind: Kind, payload: Bytes | None, num_samples: int, worker: int | None) -> None:
        """The same header to all workers, with the payload to one of them, or to all."""
        messages: dict[int, tuple[Header, Bytes | None]] = {}
        for rank in range(1, self._num_workers):
            given = payload if worker in (None, rank) else None
            size = 0 if given is None else len(given)
            messages[rank] = (Header(kind, size, num_samples, -1 if worker is None else worker), given)
        self._source.executor.submit(lambda: self._source.tell(messages))


class ReceivedBatches:
    """The same batches on another worker: its own whole, of the others' the size.

    To be iterated once, and closed.

    Args:
        receiver: this rank's end of the data.
        rank: this one.
        num_samples: of all batches.
    """

    def __init__(self, receiver: DataReceiver, rank: int, num_samples: int) -> None:
        self.num_samples = num_samples
        self._receiver, self._rank = receiver, rank
        self._description = Description()
        self._ended = False
        self._awaited: Future[Samples | None] | None = None

    def __iter__(self) -> Iterator[Samples]:
        while (samples := self._next()) is not None:
            yield samples

    def close(self) -> None:
        """Take what still comes; rank 0 ends it."""
        while self._next() is not None:
            pass

    def _next(self) -> Samples | None:
        """The next batch; the one after it is received meanwhile."""
        if self._ended:
            return None
        awaited = self._awaited or self._receiver.executor.submit(self._receive)
        samples = awaited.wait()
        self._ended = samples is None
        self._awaited = None if self._ended else self._receiver.executor.submit(self._receive)
        return samples

    def _receive(self) -> Samples | None:
        header, payload = self._receiver.receive()
        if header.kind == Kind.DESCRIPTION:
            self._description = Description.from_bytes(payload)
            header, payload = self._receiver.receive()
        if header.kind == Kind.END:
            return None
        if header.worker != self._rank:
            return _of_size(header.num_samples)
        samples, dense = unpack_ids(payload, self._description)
        return with_dense(samples, np.arange(len(samples)), dense, self._description)


def _of_size(num_samples: int) -> Samples:
    """Samples of which nothing but the number is known."""
    return Samples(
        features=(),
        values=np.empty(0, np.int64),
        lengths=np.empty((0, num_samples), np.int32),
        dense=np.empty((num_samples, 0), np.float32),
        labels=None,
        index=np.arange(num_samples),
    )
