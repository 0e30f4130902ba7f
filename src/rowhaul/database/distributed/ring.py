"""Requests between ranks, in a ring: in step i rank r serves rank (r + i) mod n, itself first.

At every moment each rank then serves one other and is served by one other, and nobody is asked by all at
once. Payloads are contiguous, and nothing waits before it has to.

Receives are posted before the message can come, not only before the own send: Gloo's thread was seen to spin
while a rank was late, which takes the core from that very rank (why it does so is not established, and early
receives only lessen it). So the next header is awaited from the end of the last call on, and payloads whose
size is known are awaited before the header that allows the others to send them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rowhaul.transport.base import Bytes, Links, Transfer

Int64s = npt.NDArray[np.int64]


class Ring:
    """What one rank says to the others and hears from them; used by one thread at a time.

    Args:
        links: nothing else uses them.
        num_words: of a header.
    """

    def __init__(self, links: Links, num_words: int) -> None:
        self.rank, self.num_ranks = links.rank, links.num_ranks
        self._links = links
        # (whom this rank serves, whom it asks) in each step after the first, in which it serves itself
        self._steps = [
            ((self.rank + step) % self.num_ranks, (self.rank - step) % self.num_ranks)
            for step in range(1, self.num_ranks)
        ]
        self._headers = np.empty((self.num_ranks, num_words), np.int64)
        self._awaited: list[Transfer] = []  # of the next headers, while there are any

    def tell(self, headers: Int64s, meanwhile: Callable[[], object] | None = None) -> Int64s:
        """Send row ``p`` to rank ``p``, and return the rows that all ranks sent here.

        What is to be done ``meanwhile`` is done when the own rows are on their way.
        """
        self.await_headers()
        sent = [self._links.post({}, {asked: _as_bytes(headers[asked])}) for _, asked in self._steps]
        if meanwhile is not None:
            meanwhile()
        received, self._awaited = self._awaited, []
        wait_for(received, sent)
        heard = self._headers.copy()
        heard[self.rank] = headers[self.rank]
        return heard

    def await_headers(self) -> None:
        """Be ready for the next headers; for nothing else that would come before them."""
        if not self._awaited:
            self._awaited = [
                self._links.post({served: _as_bytes(self._headers[served])}, {}) for served, _ in self._steps
            ]

    def await_payloads(self, arriving: Sequence[Sequence[Bytes]]) -> list[Transfer]:
        """Be ready for messages from rank ``p`` that fill ``arriving[p]``.

        Messages of a rank arrive in the order it sends them in, and must be awaited in that order: headers
        that come later are to be awaited later.
        """
        return [
            self._links.post({asked: message}, {}) for _, asked in self._steps for message in arriving[asked]
        ]

    def send(self, messages: Callable[[int], Sequence[Bytes]]) -> list[Transfer]:
        """Make the messages to every other rank in the order of the ring, and send them."""
        return [
            self._links.post({}, {served: message})
            for served, _ in self._steps
            for message in messages(served)
        ]

    def exchange(self, given: Sequence[Bytes], sizes: Sequence[int]) -> list[Bytes]:
        """Send ``given[p]`` to rank ``p``, and return what all ranks sent here; of known sizes."""
        arriving = self._empty(sizes, given[self.rank])
        received = self.await_payloads([[message] for message in arriving])
        self.await_headers()
        wait_for(received, self.send(lambda rank: [given[rank]]))
        return arriving

    def ask(
        self,
        requests: Sequence[Bytes],
        request_sizes: Sequence[int],
        answer: Callable[[int, Bytes], Bytes],
        sizes: Sequence[int],
    ) -> list[Bytes]:
        """Send requests to all ranks, answer theirs in the order of the ring; return the answers to ours."""
        arriving = self._empty(request_sizes, requests[self.rank])
        asking = dict(
            zip(self._asked(), self.await_payloads([[message] for message in arriving]), strict=True)
        )
        answers = self._empty(sizes, np.empty(0, np.uint8))
        answered = self.await_payloads([[message] for message in answers])
        self.await_headers()
        sent = self.send(lambda rank: [requests[rank]])
        answers[self.rank] = answer(self.rank, arriving[self.rank])

        def answer_when_asked(rank: int) -> list[Bytes]:
            asking[rank].wait_received()
            return [answer(rank, arriving[rank])]

        wait_for(answered, sent + self.send(answer_when_asked))
        return answers

    def _asked(self) -> Iterator[int]:
        return (asked for _, asked in self._steps)

    def _empty(self, sizes: Sequence[int], own: Bytes) -> list[Bytes]:
        messages = [np.empty(size if rank != self.rank else 0, np.uint8) for rank, size in enumerate(sizes)]
        messages[self.rank] = own
        return messages


def _as_bytes(row: Int64s) -> Bytes:
    return row.view(np.uint8)


def wait_for(received: Sequence[Transfer], sent: Sequence[Transfer] = ()) -> None:
    """Return when messages have come, and sent ones may be changed."""
    for transfer in received:
        transfer.wait_received()
    for transfer in sent:
        transfer.wait_sent()


def join(arrays: Sequence[npt.NDArray[np.generic]]) -> Bytes:
    """Arrays as one message, one after the other."""
    if not arrays:
        return np.empty(0, np.uint8)
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0]).reshape(-1).view(np.uint8)
    return np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
