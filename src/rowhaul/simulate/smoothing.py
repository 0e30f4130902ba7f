"""Early moves spread over the iterations since their rows are at rest: what that would save."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rowhaul.schedule.phases import Phase
from rowhaul.schedule.plan import Moves
from rowhaul.simulate.links import Floats
from rowhaul.simulate.timeline import Messages, Network

_Waiting = dict[int, float]  # bytes, by pair of ranks


@dataclass
class _Window:
    """A finished iteration, and the seconds that each link was idle beside its training."""

    iteration: int
    room: Floats  # links


class EvenOut:
    """Moves early bytes into the room that links had in iterations before the last one.

    Args:
        network: the links.
        reach: how many iterations before the last one are looked at.
    """

    def __init__(self, network: Network, reach: int) -> None:
        self._network = network
        self._num_ranks = len(network.speeds)
        self._windows: deque[_Window] = deque(maxlen=reach)

    def add(self, iteration: int, room: Floats) -> None:
        """Add a finished iteration."""
        self._windows.append(_Window(iteration, room.copy()))

    def left(self, moves: Moves, phases: npt.NDArray[np.int64]) -> tuple[Messages, Messages]:
        """What is left of a plan's early moves, first and second, for the iteration just before it."""
        oldest = self._windows[0].iteration if self._windows else 0
        rests_since = np.maximum(moves.ready, oldest)
        first, second = _Waiting(), _Waiting()
        for window in self._windows:
            for waiting, phase in ((first, Phase.EARLY_FIRST), (second, Phase.EARLY_SECOND)):
                self._add(waiting, moves, (phases == phase) & (rests_since == window.iteration))
            self._fill(window, first)
            if not first:  # what comes second needs some of it to be there
                self._fill(window, second)
        newest = self._windows[-1].iteration if self._windows else -1
        for waiting, phase in ((first, Phase.EARLY_FIRST), (second, Phase.EARLY_SECOND)):
            self._add(waiting, moves, (phases == phase) & (rests_since > newest))
        return self._messages(first), self._messages(second)

    def _add(self, waiting: _Waiting, moves: Moves, chosen: npt.NDArray[np.bool_]) -> None:
        pair = moves.source[chosen].astype(np.int64) * self._num_ranks + moves.target[chosen]
        for one, num_bytes in zip(pair.tolist(), moves.num_bytes[chosen].tolist(), strict=True):
            waiting[one] = waiting.get(one, 0.0) + num_bytes

    def _messages(self, waiting: _Waiting) -> Messages:
        return Messages.between(
            np.array(list(waiting), np.int64), np.array(list(waiting.values()), np.float64), self._num_ranks
        )

    def _fill(self, window: _Window, waiting: _Waiting) -> None:
        """Move waiting bytes through the room that both of their links have left in a window."""
        speeds, latencies, room = self._network.speeds, self._network.latencies, window.room
        for pair, num_bytes in list(waiting.items()):
            source, target = divmod(pair, self._num_ranks)
            ends = ((source, source), (self._num_ranks + target, target))  # link, rank
            most = min((room[link] - latencies[rank]) * speeds[rank] for link, rank in ends)
            travels = min(most, num_bytes)
            if travels > 0:
                for link, rank in ends:
                    room[link] -= latencies[rank] + travels / speeds[rank]
                waiting[pair] -= travels
            if not waiting[pair]:
                del waiting[pair]
