"""One iteration on the links: when every message starts and arrives.

Every rank goes through the phases in order; it enters the next one when it has received everything of this
one, and does not wait for what it sends. A message starts when both of its ends have reached its phase.
It takes each of the two links the latency of that end and its bytes over the speed; links serve messages
in the order in which they start. So when a message arrives depends on all that started before it, of
whatever phase: the times are the one solution of these equations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rowhaul._kernels import kernel
from rowhaul.schedule.sum_plan import SCALE, SumPlan, ways_to_sum
from rowhaul.simulate.links import Floats, Links

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Messages:
    """What travels in one phase, one element a message: all that one rank sends to another."""

    source: Integers
    target: Integers
    num_bytes: Floats

    def __len__(self) -> int:
        return len(self.source)

    @classmethod
    def none(cls) -> Messages:
        """A phase in which nothing travels."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))

    @classmethod
    def between(cls, pair: Integers, num_bytes: Floats, num_ranks: int) -> Messages:
        """Messages from bytes and the pairs of ranks (source times the number of ranks, plus target)."""
        pairs, member = np.unique(pair, return_inverse=True)
        summed = np.bincount(member.reshape(-1), num_bytes, len(pairs))
        return cls(pairs // num_ranks, pairs % num_ranks, np.asarray(summed, np.float64))


class _Ends(NamedTuple):
    """One end of every message: the link there, the seconds on it, and the latency of the other end."""

    link: Integers
    seconds: Floats
    other_latency: Floats

    @classmethod
    def joined(cls, parts: Sequence[_Ends]) -> _Ends:
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


class Network:
    """Links side by side, each way for itself; numbers are given to them from ``first`` on."""

    def __init__(self, links: Links, first: int = 0) -> None:
        self.speeds, self.latencies = links.rank_speeds(), links.rank_latencies()
        self.first, self.end = first, first + 2 * len(self.speeds)

    def senders(self, messages: Messages) -> _Ends:
        """The sending ends of messages."""
        return self._ends(self.first, messages, messages.source, messages.target)

    def receivers(self, messages: Messages) -> _Ends:
        """The receiving ends of messages."""
        return self._ends(self.first + len(self.speeds), messages, messages.target, messages.source)

    def _ends(self, first: int, messages: Messages, here: Integers, there: Integers) -> _Ends:
        seconds = self.latencies[here] + messages.num_bytes / self.speeds[here]
        return _Ends(first + here, seconds, self.latencies[there])


class Timeline:
    """The messages of an iteration on their links.

    Args:
        phases: what travels in each, and where.
    """

    def __init__(self, phases: Sequence[tuple[Messages, Network]]) -> None:
        bounds = np.cumsum([0, *(len(messages) for messages, _ in phases)]).tolist()
        self._phases = [slice(begin, end) for begin, end in pairwise(bounds)]
        self._source = np.concatenate([messages.source for messages, _ in phases])
        self._target = np.concatenate([messages.target for messages, _ in phases])
        self._ends = (
            _Ends.joined([network.senders(messages) for messages, network in phases]),
            _Ends.joined([network.receivers(messages) for messages, network in phases]),
        )
        self._num_links = max(network.end for _, network in phases)
        self._start = np.full(bounds[-1], np.inf)

    def solve(self, end: Callable[[], float]) -> float:
        """What ``end`` gives, which calls `arrivals` phase by phase, once all starts are known.

        What starts in a later phase may hold up what starts, later still, in an earlier one. So all phases
        are repeated until no start changes; each time at least one more message has its final one.
        """
        while True:
            before = self._start.copy()
            seconds = end()
            if np.array_equal(before, self._start):
                return seconds

    def arrivals(self, phase: int, begin: Floats) -> Floats:
        """When each rank has received everything of a phase that it enters at ``begin``."""
        here = self._phases[phase]
        if here.start == here.stop:
            return begin
        target = self._target[here]
        self._start[here] = np.maximum(begin[self._source[here]], begin[target])
        arrived = begin.copy()
        for ends in self._ends:
            order = np.lexsort((ends.seconds, self._start))
            finish = np.empty(len(order))
            finish_times(order, self._start, ends.link, ends.seconds, self._num_links, finish)
            np.maximum.at(arrived, target, finish[here] + ends.other_latency[here])
        return arrived

    def busy_seconds(self, phases: Iterable[int]) -> Floats:
        """How long each link works for some phases."""
        busy = np.zeros(self._num_links)
        for here in (self._phases[phase] for phase in phases):
            for ends in self._ends:
                np.add.at(busy, ends.link[here], ends.seconds[here])
        return busy


Exchanges = tuple[Messages, Messages, Messages]  # one after the other


class Sums:
    """Sums over some workers, each made in the way that is quickest for its size, as the runtime does.

    Args:
        network: the links that sums travel on.
        members: the workers.
    """

    def __init__(self, network: Network, members: Sequence[int]) -> None:
        self._network = network
        self._members = np.array(members, np.int64)
        self._chosen: dict[int, SumPlan] = {}  # by size: within a factor of two they share one

    def exchanges(self, num_bytes: int) -> Exchanges:
        """The messages of a sum of ``num_bytes``."""
        if len(self._members) < 2 or not num_bytes:
            return (Messages.none(),) * 3
        size = num_bytes.bit_length()
        if size not in self._chosen:
            least = 1 << (size - 1)
            ways = ways_to_sum(self._network.speeds[self._members].tolist(), least)
            self._chosen[size] = min(ways, key=lambda way: self._seconds(self._messages(way, least)))
        return self._messages(self._chosen[size], num_bytes)

    def _messages(self, way: SumPlan, num_bytes: float) -> Exchanges:
        """First the parts of one bucket, then of all others beside sums of as many, then the last sums."""
        if not way.parts:
            everything = self._to_each(np.full(len(self._members), float(num_bytes)))
            return everything, Messages.none(), Messages.none()
        own = num_bytes * np.array(way.parts) / (SCALE * way.buckets)  # of a bucket
        parts = self._to_each(own)
        sums = Messages(parts.target, parts.source, parts.num_bytes)
        if way.buckets == 1:
            return parts, Messages.none(), sums
        source, target, size = (
            np.concatenate([getattr(one, name) for one in (parts, sums)])
            for name in ("source", "target", "num_bytes")
        )
        return parts, Messages(source, target, (way.buckets - 1) * size), sums

    def _to_each(self, num_bytes: Floats) -> Messages:
        """Messages to each member of so many bytes, from all others."""
        source, target = np.meshgrid(self._members, self._members, indexing="ij")
        size = np.broadcast_to(num_bytes, source.shape)
        some = (source != target) & (size > 0)
        return Messages(source[some], target[some], size[some])

    def _seconds(self, exchanges: Exchanges) -> float:
        """What a sum takes if all begin it together and nothing else travels."""
        timeline = Timeline([(messages, self._network) for messages in exchanges])
        begin = np.zeros(len(self._network.speeds))

        def end() -> float:
            arrived = begin
            for phase in range(len(exchanges)):
                arrived = timeline.arrivals(phase, arrived)
            return float(arrived.max())

        return timeline.solve(end)


@kernel
def finish_times(order, start, link, seconds, num_links, finish):
    """When each message leaves its link, alone on which it would take ``seconds``.

    A link serves what starts first first, without gaps, and messages that start together in equal parts: the
    shorter ones are done earlier. ``order`` sorts messages by start, then by seconds; those
    that have no finite start do not travel yet.
    """
    free = np.zeros(num_links)  # when each link is done with all that has started
    sharing = np.zeros(num_links, np.int64)  # messages that start together and are not done
    served = np.zeros(num_links)  # seconds that each of them has had
    first = 0
    while first < len(order) and start[order[first]] < np.inf:
        began = start[order[first]]
        end = first
        while end < len(order) and start[order[end]] == began:
            on = link[order[end]]
            free[on] = max(free[on], began)
            sharing[on] += 1
            served[on] = 0.0
            end += 1
        for place in range(first, end):
            message = order[place]
            on = link[message]
            free[on] += (seconds[message] - served[on]) * sharing[on]
            served[on] = seconds[message]
            sharing[on] -= 1
            finish[message] = free[on]
        first = end
