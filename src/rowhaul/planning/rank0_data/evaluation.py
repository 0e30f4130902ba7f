"""Evaluation batches from files that only rank 0 can read: each is sent to the worker that scores it.

Workers score batches in turn. Of other workers' batches they receive the size only, so that all count the
same. Rank 0 is a round ahead: when it fails, the others have the batches they need to reach the point where
errors are exchanged.
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
    samples_of_size,
    unpack_ids,
    with_dense,
)
from rowhaul.planning.rank0_data.sharing import DataReceiver, DataSource
from rowhaul.transport.base import Bytes


class SentBatches:
    """Rank 0's batches, in order; sends the other workers theirs during iteration.

    Iterate once, then close. Batches of other workers have their size only.

    Args:
        source: this rank's end of the data.
        batches: to be evaluated.
        num_workers: which score them in turn.
        num_samples: of all batches.
    """

    def __init__(
        self, source: DataSource, batches: Iterable[Samples], num_workers: int, num_samples: int
    ) -> None:
        self.num_samples = num_samples
        self._source, self._batches = source, iter(batches)
        self._num_workers = num_workers
        self._description: Description | None = None
        self._has_ended = False

    def __iter__(self) -> Iterator[Samples]:
        try:
            here: list[Samples] = []
            while following := list(islice(self._batches, self._num_workers)):
                sent = self._send(following)
                yield from here
                here = sent
            self.close()
            yield from here
        finally:
            self.close()

    def close(self) -> None:
        """Announce the end to the other workers."""
        if not self._has_ended:
            self._has_ended = True
            self._post(Kind.END)

    def _send(self, batches: list[Samples]) -> list[Samples]:
        """Send a round; return rank 0's view of it."""
        if self._description is None:
            self._description = Description.of(batches[0])
            self._post(Kind.DESCRIPTION, self._description.to_bytes())
        for worker, samples in enumerate(batches):
            self._description.check(samples)
            payload = None
            if worker:
                everything = np.arange(len(samples))
                payload = np.concatenate([pack_ids(samples), pack_dense(samples, everything)])
            self._post(Kind.WHOLE, payload, len(samples), worker)
        return [batches[0], *map(samples_of_size, map(len, batches[1:]))]

    def _post(self, kind: Kind, payload: Bytes | None = None, num_samples: int = 0, worker: int = -1) -> None:
        """Send a header to all other workers, and the payload to one of them, or to all."""
        bare = Header(kind, 0, num_samples, worker), None
        full = bare if payload is None else (Header(kind, len(payload), num_samples, worker), payload)
        messages = {rank: full if worker in (-1, rank) else bare for rank in range(1, self._num_workers)}
        self._source.executor.submit(lambda: self._source.send(messages))


class ReceivedBatches:
    """The same batches on another worker: its own in full, of others the size only.

    Iterate once, then close.

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
        """Receive the remaining batches until rank 0 ends them."""
        while self._next() is not None:
            pass

    def _next(self) -> Samples | None:
        """Return the next batch, and start to receive the one after it."""
        if self._ended:
            return None
        samples = (self._awaited or self._receiver.executor.submit(self._receive)).wait()
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
            return samples_of_size(header.num_samples)
        samples, dense = unpack_ids(payload, self._description)
        return with_dense(samples, np.arange(len(samples)), dense, self._description)
