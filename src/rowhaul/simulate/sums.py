"""The sum of dense gradients and replicated rows over the workers: which messages it takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rowhaul.simulate.timeline import Messages, Network, Timeline

Exchanges = tuple[Messages, Messages]  # one after the other


class Sums:
    """Sums over some workers, each made in the way that is quickest for its size, as the runtime does.

    Args:
        network: the links that sums travel on.
        members: the workers.
    """

    def __init__(self, network: Network, members: Sequence[int]) -> None:
        self._network = network
        self._members = np.array(members, np.int64)
        self._known: dict[int, Exchanges] = {}

    def exchanges(self, num_bytes: int) -> Exchanges:
        """The messages of a sum of so many bytes."""
        if len(self._members) < 2 or not num_bytes:
            return Messages.none(), Messages.none()
        if num_bytes not in self._known:
            ways = (self._to_everyone, self._at_first, self._in_slices)
            self._known[num_bytes] = min((way(num_bytes) for way in ways), key=self._seconds)
        return self._known[num_bytes]

    def _to_everyone(self, num_bytes: int) -> Exchanges:
        return self._all_pairs(num_bytes), Messages.none()

    def _at_first(self, num_bytes: int) -> Exchanges:
        """The first one adds up, and sends the sum to all others."""
        others = self._members[1:]
        first, sizes = np.full(len(others), self._members[0]), np.full(len(others), float(num_bytes))
        return Messages(others, first, sizes), Messages(first, others, sizes)

    def _in_slices(self, num_bytes: int) -> Exchanges:
        """Everyone adds up one slice, and sends the sum to all others."""
        slices = self._all_pairs(num_bytes / len(self._members))
        return slices, slices

    def _all_pairs(self, num_bytes: float) -> Messages:
        source, target = (
            grid.reshape(-1) for grid in np.meshgrid(self._members, self._members, indexing="ij")
        )
        others = source != target
        return Messages(source[others], target[others], np.full(int(others.sum()), float(num_bytes)))

    def _seconds(self, exchanges: Exchanges) -> float:
        """What a sum takes if all begin it together and nothing else travels."""
        timeline = Timeline([(messages, self._network) for messages in exchanges])
        begin = np.zeros(len(self._network.speeds))
        return timeline.solve(lambda: float(timeline.arrivals(1, timeline.arrivals(0, begin)).max()))
