"""Requests between ranks, in a ring: in step i rank r serves rank (r + i) mod n, itself first.

At every moment each rank then serves one other and is served by one other, and nobody is asked by all at
once. Payloads are contiguous, receives are posted before sends, and nothing waits before it has to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rowhaul.exchange.transport import Bytes, Links, Transfer

Int64s = npt.NDArray[np.int64]


class Ring:
    """What one rank says to the others and hears from them; used by one thread at a time."""

    def __init__(self, links: Links) -> None:
        self.rank, self.num_ranks = links.rank, links.num_ranks
        self._links = links
        # (whom this rank serves, whom it asks) in each step after the first, in which it serves itself
        self._steps = [
            ((self.rank + step) % self.num_ranks, (self.rank - step) % self.num_ranks)
            for step in range(1, self.num_ranks)
        ]

    def tell(self, headers: Int64s) -> Int64s:
        """Send row ``p`` to rank ``p``, and return the rows that all ranks sent here; of equal lengths."""
        heard = headers.copy()
        transfers = [
            self._links.post({served: _as_bytes(heard[served])}, {asked: _as_bytes(headers[asked])})
            for served, asked in self._steps
        ]
        _wait(transfers)
        return heard

    def exchange(self, given: Sequence[Bytes], sizes: Sequence[int]) -> list[Bytes]:
        """Send ``given[p]`` to rank ``p``, and return what all ranks sent here; of known sizes."""
        return self.serve(lambda peer: given[peer], sizes)

    def serve(self, answer: Callable[[int], Bytes], sizes: Sequence[int]) -> list[Bytes]:
        """Make every rank's answer in the order of the ring, send it; return the answers to this rank."""
        answers, transfers = self.begin(answer, sizes)
        _wait(transfers)
        return answers

    def begin(
        self, answer: Callable[[int], Bytes], sizes: Sequence[int]
    ) -> tuple[list[Bytes], list[Transfer]]:
        """The same without waiting: answers are there, and sent ones free, when all transfers are done."""
        answers = [np.empty(size, np.uint8) for size in sizes]
        answers[self.rank] = answer(self.rank)
        transfers = [
            self._links.post({asked: answers[asked]}, {served: answer(served)})
            for served, asked in self._steps
        ]
        return answers, transfers

    def ask(
        self,
        requests: Sequence[Bytes],
        request_sizes: Sequence[int],
        answer: Callable[[int, Bytes], Bytes],
        sizes: Sequence[int],
    ) -> list[Bytes]:
        """Send requests to all ranks, answer theirs in the order of the ring; return the answers to ours."""
        arriving = [np.empty(size, np.uint8) for size in request_sizes]
        arriving[self.rank] = requests[self.rank]
        asking = {
            served: self._links.post({served: arriving[served]}, {asked: requests[asked]})
            for served, asked in self._steps
        }

        def answer_when_asked(peer: int) -> Bytes:
            if peer != self.rank:
                asking[peer].wait_received()
            return answer(peer, arriving[peer])

        answers = self.serve(answer_when_asked, sizes)
        for transfer in asking.values():  # received before: a message can be waited for once
            transfer.wait_sent()
        return answers


def _as_bytes(row: Int64s) -> Bytes:
    return row.view(np.uint8)


def _wait(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait_received()
    for transfer in transfers:
        transfer.wait_sent()


def join(arrays: Sequence[npt.NDArray[np.generic]]) -> Bytes:
    """Arrays as one message, one after the other."""
    if not arrays:
        return np.empty(0, np.uint8)
    return np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
