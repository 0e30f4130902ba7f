"""Links that measure how long this rank waits for each other rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rowhaul.transport.base import Bytes, Links, Transfer

OnWait = Callable[[int, float, float], None]


class MeasuredLinks:
    """Links whose waits are reported: the rank waited for, and when the wait began and ended.

    Messages are waited for one after the other, so a wait may cover what others took as well; another rank
    comes first every time, so that this evens out.
    """

    def __init__(self, links: Links, on_wait: OnWait) -> None:
        self.rank, self.num_ranks, self.near = links.rank, links.num_ranks, links.near
        self._links, self._on_wait = links, on_wait
        self._num_posted = 0

    def post(self, receives: Mapping[int, Bytes], sends: Mapping[int, Bytes]) -> MeasuredTransfer:
        """Start messages, receives first; does not wait."""
        self._num_posted += 1
        peers = sorted(receives)
        first = self._num_posted % len(peers) if peers else 0
        received = {
            peer: self._links.post({peer: receives[peer]}, {}) for peer in peers[first:] + peers[:first]
        }
        return MeasuredTransfer(received, self._links.post({}, sends), self._on_wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._links, name)  # what a transport has beyond `Links`


class MeasuredTransfer:
    """Messages in flight, one transfer for each rank they come from."""

    def __init__(self, received: Mapping[int, Transfer], sent: Transfer, on_wait: OnWait) -> None:
        self._received, self._sent, self._on_wait = received, sent, on_wait

    def wait_received(self) -> None:
        """Return when all receives are complete."""
        for peer, transfer in self._received.items():
            began = time.monotonic()
            transfer.wait_received()
            self._on_wait(peer, began, time.monotonic())

    def wait_sent(self) -> None:
        """Return when the sent buffers may be reused."""
        self._sent.wait_sent()
