"""Measures the latency and the speed of the links between ranks.

Pairs are measured in rounds in which no rank is in two pairs, so that each has its ends' links to itself. The
lower rank of a pair leads: it holds the clock and orders each trial. The time of a trial of a few bytes, with
as many trips, is subtracted. Trials start small and grow until the pair's share of time or bytes is used up,
so that a slow link costs no more than a fast one. The better of the last two counts: earlier ones use up the
burst that a shaper lets pass, and a busy machine may delay any of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rowhaul.transport.base import Bytes, Collective, Links

_Buffers = Mapping[int, Bytes]
Matrix = npt.NDArray[np.float64]

_TO_FOLLOWER: Final = 1
_TO_LEADER: Final = 2
_BOTH_WAYS: Final = _TO_FOLLOWER | _TO_LEADER
_EACH_OF_THE_WAYS: Final = (_TO_FOLLOWER, _TO_LEADER, _BOTH_WAYS)
_STOP: Final = -1

_FIRST_BYTES = 16384
_LEAST_BYTES_PER_PAIR = 6 * _FIRST_BYTES
_GROWTH = 4  # from one trial to the next
_MAX_PINGS = 20
_NUM_SMALL = 3  # trials of a few bytes, to measure the trips
_PING_SHARE = 0.2  # of a pair's time, for all small messages


@dataclass(frozen=True)
class LinkMeasurements:
    """Latency and speed between each two ranks; the same on all ranks.

    Matrices are ranks x ranks. On the diagonal the latency is 0 and the speeds are infinite.
    """

    latency_seconds: Matrix  # of a small message, one way
    bytes_per_second: Matrix  # from the rank of the row to that of the column, one way at a time
    both_ways_bytes_per_second: Matrix  # each way, while both are used

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.latency_seconds)

    def rank_speeds(self) -> tuple[float, ...]:
        """Estimate bytes per second of each rank's own link, each way while both are used.

        A pair is as fast as the slower of its two links, so a rank's own is as fast as its fastest pair.
        Too low for a rank whose link is faster than all others.
        """
        among_others = np.where(np.eye(self.num_ranks, dtype=bool), 0.0, self.both_ways_bytes_per_second)
        return tuple(float(speed) for speed in among_others.max(axis=1))


def measure_links(
    links: Links,
    collective: Collective,
    *,
    seconds_per_pair: float = 0.3,
    bytes_per_pair: int = 8 * 2**20,
) -> LinkMeasurements:
    """Measure every pair of ranks; all ranks call this together.

    Args:
        links: the links to measure, with no messages in flight.
        collective: a group of the same ranks, to share the results.
        seconds_per_pair: time for one pair, about; each kind of trial is made at least once.
        bytes_per_pair: most bytes of one pair, both ways together.
    """
    if links.num_ranks != collective.num_ranks:
        raise ValueError(
            f"the links have {links.num_ranks} ranks and the collective {collective.num_ranks}: give groups "
            "of the same ranks"
        )
    if bytes_per_pair < _LEAST_BYTES_PER_PAIR:
        raise ValueError(f"a pair needs at least {_LEAST_BYTES_PER_PAIR:,} bytes; got {bytes_per_pair:,}")
    most_bytes = bytes_per_pair // len(_EACH_OF_THE_WAYS)
    end = _End(links, most_bytes)
    led = np.zeros((4, links.num_ranks))  # results of the pairs that this rank leads
    for pairs in rounds_of_pairs(links.num_ranks):
        collective.all_gather(np.zeros(1, np.uint8))  # a barrier between rounds
        for low, high in pairs:
            if links.rank == low:
                led[:, high] = end.lead(high, seconds_per_pair, most_bytes)
            elif links.rank == high:
                end.follow(low)
    everyone = collective.all_gather(led.reshape(-1).view(np.uint8)).view(np.float64)
    return _table(everyone.reshape(links.num_ranks, 4, links.num_ranks))


def rounds_of_pairs(num_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Yield every pair of ranks once, lower rank first, in rounds in which no rank is in two pairs.

    >>> list(rounds_of_pairs(4))
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places = num_ranks + num_ranks % 2  # with an odd number one rank rests in each round
    circle = list(range(places))
    for _ in range(places - 1):
        facing = zip(circle[: places // 2], reversed(circle[places // 2 :]), strict=True)
        pairs = [(min(pair), max(pair)) for pair in facing]
        yield sorted(pair for pair in pairs if pair[1] < num_ranks)
        circle.insert(1, circle.pop())


def _table(led: Matrix) -> LinkMeasurements:  # ranks that led x (latency, to, from, both ways) x ranks
    latency, towards, back, both = (led[:, quantity, :] for quantity in range(4))
    tables = [latency + latency.T, towards + back.T, both + both.T]
    for table, own in zip(tables, (0.0, np.inf, np.inf), strict=True):
        np.fill_diagonal(table, own)
        table.setflags(write=False)
    return LinkMeasurements(*tables)


class _End:
    """One end of a rank's pairs, with memory that was touched before the clock runs."""

    def __init__(self, links: Links, most_bytes: int) -> None:
        self.links = links
        self._incoming = np.ones(most_bytes, np.uint8)
        self._outgoing = np.ones(most_bytes, np.uint8)

    def payload(self, peer: int, num_bytes: int, receives: bool, sends: bool) -> tuple[_Buffers, _Buffers]:
        """Return the buffers that a trial receives and sends."""
        incoming, outgoing = {peer: self._incoming[:num_bytes]}, {peer: self._outgoing[:num_bytes]}
        return incoming if receives else {}, outgoing if sends else {}

    def trial(self, peer: int, ways: int, num_bytes: int) -> float:
        """Time a trial, from its order until this end knows that both have everything."""
        answer, order = np.empty(1, np.uint8), np.array([ways, num_bytes], np.int64).view(np.uint8)
        incoming, outgoing = self.payload(peer, num_bytes, bool(ways & _TO_LEADER), bool(ways & _TO_FOLLOWER))
        started = time.perf_counter()
        if ways:  # each receive is posted before the send that triggers it
            transfers = [self.links.post(incoming, {peer: order}), self.links.post({peer: answer}, outgoing)]
        else:
            transfers = [self.links.post({peer: answer}, {peer: order})]
        for transfer in transfers:
            transfer.wait_received()
        seconds = time.perf_counter() - started
        for transfer in transfers:
            transfer.wait_sent()
        return seconds

    def follow(self, leader: int) -> None:
        """Carry out the leader's orders until it stops."""
        order, answer = np.empty(16, np.uint8), np.ones(1, np.uint8)
        last = self.links.post({leader: order}, {})
        while True:
            last.wait_received()
            ways, num_bytes = (int(number) for number in order.view(np.int64))
            last.wait_sent()
            if ways == _STOP:
                return
            payload = self.links.post(
                *self.payload(leader, num_bytes, bool(ways & _TO_FOLLOWER), bool(ways & _TO_LEADER))
            )
            payload.wait_received()
            last = self.links.post({leader: order}, {leader: answer})
            payload.wait_sent()

    def lead(self, peer: int, seconds: float, most_bytes: int) -> list[float]:
        """Measure latency, speed to the peer, speed from it, and speed each way at once."""
        self.trial(peer, 0, 0)  # connects, and waits for the peer
        pings = self._trials(peer, 0, 0, _MAX_PINGS, seconds * _PING_SHARE / 2)
        # The quickest, and before anything large: delays by a busy machine or a queue on the way would be
        # subtracted from the time of the payload.
        trips = {
            ways: min(self._trials(peer, ways, 1, _NUM_SMALL, seconds * _PING_SHARE / 6))
            for ways in _EACH_OF_THE_WAYS
        }
        each = seconds * (1 - _PING_SHARE) / len(_EACH_OF_THE_WAYS)
        speeds = [self._speed(peer, ways, around, each, most_bytes) for ways, around in trips.items()]
        self.links.post({}, {peer: np.array([_STOP, 0], np.int64).view(np.uint8)}).wait_sent()
        return [float(np.median(pings)) / 2, *speeds]

    def _trials(self, peer: int, ways: int, num_bytes: int, most: int, seconds: float) -> list[float]:
        taken = [self.trial(peer, ways, num_bytes)]
        while len(taken) < most and sum(taken) < seconds:
            taken.append(self.trial(peer, ways, num_bytes))
        return taken

    def _speed(self, peer: int, ways: int, trips: float, seconds: float, most_bytes: int) -> float:
        """Measure bytes per second each way, with the two largest trials that time and bytes allow."""
        deadline = time.perf_counter() + seconds
        left = most_bytes // (2 if ways == _BOTH_WAYS else 1)
        size = _FIRST_BYTES
        while True:
            speed = self._speed_of_trial(peer, ways, size, trips)
            left -= size
            seconds_left = max(deadline - time.perf_counter(), 0)
            larger = int(min(_GROWTH * size, left / 2, speed * seconds_left / 2))
            if larger <= size:
                break
            size = larger
        if left < size:
            return speed
        return max(speed, self._speed_of_trial(peer, ways, size, trips))

    def _speed_of_trial(self, peer: int, ways: int, num_bytes: int, trips: float) -> float:
        taken = self.trial(peer, ways, num_bytes)
        # Where trips take most of the time, the rest is noise: subtract three quarters at most.
        return num_bytes / max(taken - trips, taken / 4)
